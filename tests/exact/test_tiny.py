"""The promise on tiny models of every format: a token's logits are the same bits whoever is in the batch, however the
prompt is cut, after a preemption, with any number of threads, fused or not, on every instruction set."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from headrace import native
from headrace.program.decoder import write_program
from tests.exact.checkpoints import MAKERS
from tests.exact.company import Company, same
from tests.models.running import Model, difference, transformers_logits
from tests.models.tiny import tiny_checkpoint
from tests.native.weights import SCALES

NAMES = pytest.mark.parametrize("name", MAKERS)
CODES = [("k_quants", "int8"), ("k_quants", "int4"), ("bf16_windows", "int4"), ("blocks_of_32", "int8")]
"""Heads of 64 and 32 channels, and of 16, which fill half a group."""
MODELS = pytest.mark.parametrize(("name", "kv_format"), [*product(MAKERS, ["bf16", "f32"]), *CODES])
WAYS = [(isa, threads, fuse) for isa in native.isas() for threads, fuse in ((1, False), (2, True), (3, True))]
"""Instruction set, threads, fusion: each is tried with every way to cut and mix."""


def prompt(seed: int, length: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 300, length)]


LONG = prompt(99, 600)
"""More than one segment of attention."""


@pytest.fixture(scope="module")
def wholes(tiny_model: Callable[[str], Model]) -> Callable[[str, str], dict[int, np.ndarray]]:
    """Logits of `LONG` by position, in one chunk, on one thread, by the best instruction set."""
    return cache(lambda name, kv_format: Company(tiny_model(name), kv_format, threads=1).alone(longest(name)))


def longest(name: str) -> list[int]:
    return LONG if name != "f32_partial" else LONG[:500]


@NAMES
def test_the_model_is_a_model(
    name: str, tiny_model: Callable[[str], Model], wholes: Callable[[str, str], dict[int, np.ndarray]]
) -> None:
    """What is compared below are logits that mean something: near the reference's, different at every position."""
    tokens = longest(name)[:150]
    got = np.stack([wholes(name, "f32")[p] for p in range(150)])
    assert difference(got, tiny_model(name).logits(tokens)) < 0.1
    assert len({line.tobytes() for line in got}) == 150


@MODELS
@pytest.mark.parametrize("rows", [2, 7, 32])
def test_alone_or_in_company(name: str, kv_format: str, rows: int, tiny_model: Callable[[str], Model]) -> None:
    model, rng = tiny_model(name), np.random.default_rng(rows)
    count = {2: 4, 7: 10, 32: 40}[rows]
    prompts = [prompt(n, int(rng.choice([1, 3, 20, 32, 33, 64, 90]))) for n in range(count)]
    one = Company(model, kv_format, threads=1)
    want = [one.alone(tokens) for tokens in prompts]
    for isa, threads, fuse in WAYS[rows % 3 :: 2 if kv_format in ("bf16", "f32") else 4]:
        company = Company(model, kv_format, isa=isa, threads=threads, fuse=fuse, tokens=4000)
        seen = 0
        for (request, position), line in company.together(prompts, rng, rows=rows):
            where = f"request {request} of {len(prompts[request])} tokens at {position}, {isa}, {threads}, {fuse}"
            assert same(line, want[request][position]), where
            seen += 1
        assert seen >= sum(map(len, prompts))


@MODELS
def test_in_one_chunk_or_many(
    name: str,
    kv_format: str,
    tiny_model: Callable[[str], Model],
    wholes: Callable[[str, str], dict[int, np.ndarray]],
) -> None:
    tokens, want = longest(name), wholes(name, kv_format)
    cuts = {"1": [1] * len(tokens), "16": [16] * 40, "33": [33] * 20, "512": [512], "mixed": [7, 1, 1, 500, 3, 1, 20]}
    ways = WAYS if kv_format == "bf16" else WAYS[::2] if kv_format == "f32" else WAYS[::3]
    for number, (isa, threads, fuse) in enumerate(ways):
        company = Company(tiny_model(name), kv_format, isa=isa, threads=threads, fuse=fuse)
        for size in list(cuts)[number % 2 :: 2]:
            got = company.alone(tokens, cuts[size])
            for position, line in got.items():
                assert same(line, want[position]), f"chunks of {size}, position {position}, {isa}, {threads}, {fuse}"
            assert got.keys() == want.keys()


@pytest.mark.parametrize(
    ("name", "kv_format"), [*product(["k_quants", "bf16_windows"], ["bf16", "f32"]), *CODES[:1], *CODES[2:3]]
)
def test_segments_of_a_long_row_apart(name: str, kv_format: str, tiny_model: Callable[[str], Model]) -> None:
    """One to three tokens that see two or three segments, by more threads than there are heads."""
    tokens, last = prompt(98, 1080), set(range(1000, 1080, 3)) | {1079}
    want = Company(tiny_model(name), kv_format, threads=1).alone(tokens, (), last)
    for isa, threads, sizes in zip(native.isas(), (8, 5, 30), ([1] * 80, [3, 1] * 20, [2] * 40), strict=False):
        got = Company(tiny_model(name), kv_format, isa=isa, threads=threads).alone(tokens, [1000, *sizes], last)
        assert all(same(got[position], want[position]) for position in last), (isa, threads)


@NAMES
def test_wanted_or_not(
    name: str, tiny_model: Callable[[str], Model], wholes: Callable[[str, str], dict[int, np.ndarray]]
) -> None:
    """Logits of some positions are those of all."""
    want = wholes(name, "bf16")
    for wanted in ({499}, {0, 31, 32, 400}, set(range(3, 300, 7))):
        got = Company(tiny_model(name)).alone(longest(name), [100], wanted)
        assert got.keys() == wanted
        assert all(same(line, want[position]) for position, line in got.items())


# ---- case K5

DECODED = 20


def around(window: int) -> list[int]:
    """Lengths of prompts where a window is first full, and where it first is the second time."""
    return [*range(window - 2, window + 3), *range(2 * window - 2, 2 * window + 3)]


@pytest.mark.parametrize(
    ("window", "kv_format", "tolerance"),
    [
        (48, "f32", 1e-4),
        (64, "f32", 1e-4),
        (48, "bf16", 2e-2),
        (64, "bf16", 2e-2),
        (48, "int8", 3e-2),
        (64, "int4", 0.2),
    ],
)
def test_k5_where_a_window_is_first_full(window: int, kv_format: str, tolerance: float, tmp_path: Path) -> None:
    """Every prompt in chunks of every size, then 20 tokens one by one: the bits of a single pass over everything, and
    near what transformers computes."""
    folder = tiny_checkpoint(tmp_path, "gemma3_text", sliding_window=window)
    model, lengths = Model.open(folder), around(window)
    text = prompt(window, lengths[-1] + DECODED)
    isas = native.isas()[:-1] or native.isas()  # portable ones are slow, and compared with these above
    companies = [Company(model, kv_format, isa=isa, threads=2) for isa in isas]
    assert set(companies[0].windows) == {window, None}
    want = companies[0].alone(text)
    theirs = transformers_logits(folder, text)
    for position, line in want.items():
        assert difference(line, theirs[position]) < tolerance, position
    for n, (length, size) in enumerate(product(lengths, [1, 16, 33, window, window + 1, 100, len(text)])):
        cuts = [size] * (length // size) + [length % size] * (length % size > 0) + [1] * DECODED
        got = companies[n % len(companies)].alone(text[: length + DECODED], cuts)
        assert len(got) == length + DECODED
        for position, line in got.items():
            assert same(line, want[position]), f"a prompt of {length} in chunks of {size}, position {position}"


def test_another_token_is_seen(tiny_model: Callable[[str], Model]) -> None:
    """What comes later moves no bit of what came before; what came before moves what comes later."""
    company = Company(tiny_model("k_quants"))
    want = company.alone(LONG[:80])
    changed = LONG[:80]
    changed[40] = (changed[40] + 1) % 300
    got = company.alone(changed)
    assert all(same(got[p], want[p]) for p in range(40))
    assert not any(same(got[p], want[p]) for p in range(40, 80))


@pytest.mark.parametrize("name", ["k_quants", "f32_partial"])
def test_not_finite_stays_in_its_request(name: str, tiny_model: Callable[[str], Model]) -> None:
    """A token whose embedding is NaN: whoever has it gets NaN from there on, nobody else sees it, neither beside it nor
    later in the blocks that it wrote."""
    model = spoiled(tiny_model(name), token=7)
    prompts = [[t for t in prompt(n, 60) if t != 7] for n in range(14)]
    one = Company(model, threads=1)
    want = {n: one.alone(tokens) for n, tokens in enumerate(prompts) if n % 3}
    for tokens in prompts[::3]:
        tokens[25] = 7
    company = Company(model, threads=2, tokens=700)
    for (request, position), line in company.together(prompts, np.random.default_rng(2), rows=6):
        if request in want:
            assert same(line, want[request][position]), (request, position)
        elif position >= 25:
            assert np.isnan(line).all(), (request, position)


def spoiled(model: Model, token: int) -> Model:
    """The model, whose head has a table of its own, with NaN for the embedding of a token."""
    program = write_program(model.spec, model.weights, model.spec.context)
    table = next(op.weights[0] for op in program.body if op.kind == "embed")
    weight = model.weights[table]
    data = weight.data.copy()
    blocks = data[token].reshape(-1, weight.block_bytes)
    nan = {"F32": np.float32, "BF16": ml_dtypes.bfloat16}.get(weight.name, np.float16)
    for at in SCALES.get(weight.name, (0,)):
        blocks[:, at : at + np.dtype(nan).itemsize] = np.array([np.nan], nan).view(np.uint8)
    return Model(model.spec, {**model.weights, table: type(weight)(weight.shape, data)})
