"""Programs as data: well formed, buffers that never collide, memory known beforehand, layers grouped without waste."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.models.spec import Spec
from headrace.program.buffers import body_plan, head_plan, last_uses, peak_bytes
from headrace.program.check import check
from headrace.program.decoder import write_program
from headrace.program.layout import WASTE, kv_layout
from headrace.program.program import Extent, KVGroup, Operation, Program
from tests.models.running import Model
from tests.models.tiny import FAMILIES, tiny_checkpoint


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.open(tiny_checkpoint(tmp_path_factory.mktemp("tiny"), request.param))


@pytest.fixture(scope="module")
def program(model: Model) -> Program:
    return write_program(model.spec, model.weights, 512)


def test_a_program_is_well_formed_and_uses_every_weight(model: Model, program: Program) -> None:
    check(program, model.weights)
    used = {name for op in (*program.body, *program.head) for name in op.weights}
    assert used == set(model.weights) | set(program.constants)
    assert program.buffers[program.hidden].width == program.width == model.spec.width
    assert program.buffers[program.logits].width == program.vocab == model.spec.vocab
    assert len({op.kind for op in (*program.body, *program.head)}) <= 12


def test_a_tied_head_is_one_weight_named_twice(model: Model, program: Program) -> None:
    assert program.head[0].weights == (("embed.weight",) if model.spec.tied else ("head.weight",))


def test_no_two_live_buffers_share_a_slot(program: Program) -> None:
    plan = body_plan(program)
    live = {"tokens", "positions", "wanted"}
    for op, dies in zip(program.body, plan.dies, strict=True):
        assert live.issuperset(op.inputs)
        if op.output is not None:
            live.add(op.output)
        slots = [plan.slot_of[name] for name in live]
        assert len(slots) == len(set(slots)), op
        for name in live:
            slot = plan.slots[plan.slot_of[name]]
            assert slot.width >= program.buffers[name].width
            assert slot.extent is program.buffers[name].extent
        live -= set(dies)
    assert live == {program.hidden}


def test_the_plan_is_no_larger_than_what_must_live_together(program: Program) -> None:
    plan, live, most = body_plan(program), {"tokens", "positions"}, 0
    for op, dies in zip(program.body, plan.dies, strict=True):
        live |= {op.output} if op.output else set()
        widths = [program.buffers[name].width for name in live if program.buffers[name].extent is Extent.TOKENS]
        most = max(most, 4 * sum(widths))
        live -= set(dies)
    assert most <= plan.bytes_per(Extent.TOKENS) <= 1.4 * most


def test_peak_bytes_counts_tokens_and_wanted(program: Program) -> None:
    body, head = body_plan(program), head_plan(program)
    assert peak_bytes(body, head, 100, 0, 0) == 100 * body.bytes_per(Extent.TOKENS)
    wanted = body.bytes_per(Extent.WANTED)
    assert peak_bytes(body, head, 100, 7, 0) == 100 * body.bytes_per(Extent.TOKENS) + 7 * wanted
    assert peak_bytes(body, head, 0, 700, 3) == max(700 * wanted, 3 * head.bytes_per(Extent.WANTED))
    assert head.bytes_per(Extent.WANTED) >= 4 * (program.vocab + program.width)


def test_layers_of_one_program_do_not_pile_up(tmp_path: Path) -> None:
    model = Model.open(tiny_checkpoint(tmp_path, "llama"))
    deep = replace(model.spec, blocks=model.spec.blocks * 8)
    programs = [write_program(spec, model.weights, 512) for spec in (model.spec, deep)]
    plans = [peak_bytes(body_plan(p), head_plan(p), 64, 1, 1) for p in programs]
    assert plans[0] == plans[1]


def test_last_uses() -> None:
    ops = [Operation("add", ("a", "a"), "b"), Operation("add", ("a", "b"), "c"), Operation("add", ("b", "b"), "d")]
    assert last_uses([(op,) for op in ops], ("d",)) == ((), ("a", "c"), ("b",))


def _broken(program: Program, number: int, **changes: object) -> Program:
    body = list(program.body)
    body[number] = replace(body[number], **changes)  # type: ignore[arg-type]
    return replace(program, body=tuple(body))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("rms_norm", {"kind": "layer_norm"}, "no such kind"),
        ("rms_norm", {"inputs": ()}, "takes"),
        ("rms_norm", {"weights": ()}, "takes the weights"),
        ("rms_norm", {"weights": ("nothing",)}, "no weight nothing"),
        ("rms_norm", {"attrs": {"eps": 1e-6}}, "takes the attributes"),
        ("rms_norm", {"attrs": {"eps": 1e-6, "offset": "1"}}, "takes the attributes"),
        ("rms_norm", {"inputs": ("later",)}, "reads later, which nobody has written"),
        ("rms_norm", {"output": "embed"}, "written twice"),
        ("attend", {"layer": None}, "needs a layer"),
        ("add", {"layer": 0}, "no use for a layer"),
        ("store", {"output": "x"}, "takes"),
    ],
)
def test_a_broken_program_is_refused(kind: str, changes: dict[str, object], message: str, tmp_path: Path) -> None:
    model = Model.open(tiny_checkpoint(tmp_path, "llama", num_hidden_layers=1))
    program = write_program(model.spec, model.weights, 512)
    number = next(i for i, op in enumerate(program.body) if op.kind == kind)
    with pytest.raises(ValueError, match=message):
        check(_broken(program, number, **changes), model.weights)


# ---- layout


def test_layers_of_one_kind_are_one_group() -> None:
    layout = kv_layout([None] * 30, 3, 64, 8192)
    assert layout.groups == (KVGroup(None, tuple(range(30))),)
    assert (layout.slots, layout.kv_heads, layout.dim) == (30, 3, 64)
    assert layout.place(7) == (0, 7)
    with pytest.raises(KeyError):
        layout.place(30)


def test_gemma3_270m() -> None:
    windows = [512 if (i + 1) % 6 else None for i in range(18)]
    layout = kv_layout(windows, 1, 256, 32768)
    assert layout.slots == 3
    assert [g.window for g in layout.groups].count(512) == 5
    assert layout.groups[-1] == KVGroup(None, (5, 11, 17))


def test_a_window_that_no_context_can_leave_is_none() -> None:
    assert len(kv_layout([4096, None] * 3, 1, 8, 4096).groups) == 1
    assert len(kv_layout([4096, None] * 3, 1, 8, 4097).groups) == 2


def test_any_mixture_wastes_little_and_places_every_layer_once() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        kinds = [None, 64, 128][: rng.integers(1, 4)]
        windows = [kinds[i] for i in rng.integers(0, len(kinds), rng.integers(1, 80))]
        layout = kv_layout(windows, 1, 8, 1000)
        places = [layout.place(layer) for layer in range(len(windows))]
        assert len(set(places)) == len(windows)
        assert all(layout.groups[g].window == windows[layer] for layer, (g, _) in enumerate(places))
        assert all(slot < layout.slots for _, slot in places)
        assert 1 - len(windows) / (len(layout.groups) * layout.slots) <= WASTE


def test_a_step_takes_the_memory_that_was_planned(tmp_path: Path) -> None:
    """PyTorch's own buffers are not traced by Python; NumPy's results are: only they may be left after a step."""
    model = Model.open(tiny_checkpoint(tmp_path, "llama"))
    tracemalloc.start()
    try:
        model.logits(list(range(64)), wanted=[63])
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 4 << 20


def test_specs_with_unequal_layers_are_refused(tmp_path: Path) -> None:
    spec: Spec = Model.open(tiny_checkpoint(tmp_path, "llama")).spec
    first = replace(spec.blocks[0], attention=replace(spec.blocks[0].attention, kv_heads=4))
    with pytest.raises(ValueError, match="layers differ"):
        replace(spec, blocks=(first, *spec.blocks[1:]))
