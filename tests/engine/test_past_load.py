"""Past load: what is counted, kept and proposed; files that are not ours; an engine that keeps it."""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace import LLM, OptionError, SamplingParams
from headrace.config import Options
from headrace.engine import past_load
from headrace.engine.build import plan_engine
from headrace.engine.past_load import Counts, LoadKeeper, Seen, load_file, read_seen, step_of, top_of
from headrace.errors import EngineDeadError
from headrace.hardware import resident
from headrace.scheduler.messages import Delta
from tests.models.tiny import tiny_checkpoint


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Any:
    return SimpleNamespace(path=tmp_path / "a model.gguf", name="a model")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")


def test_steps_follow_each_other_and_are_narrow() -> None:
    for number in range(70_000):
        step = step_of(number)
        assert step_of(top_of(step)) == step
        assert step_of(top_of(step) + 1) == step + 1
        assert number <= top_of(step) <= max(number, number * 5 // 4)


def test_within_is_never_too_little_and_at_most_a_step_too_much() -> None:
    choose = random.Random(3)
    numbers = [int(choose.paretovariate(0.7)) % 100_000 for _ in range(2000)]
    counts = Counts()
    for number in numbers:
        counts.add(number)
    for share in (0.01, 0.5, 0.99, 1.0):
        true = sorted(numbers)[math.ceil(share * 2000) - 1]
        assert true <= counts.within(share) <= max(numbers)
        assert counts.within(share) <= max(8, true * 5 // 4)
    assert Counts().within(0.99) == 0


CONTEXT = 300_000


def run(keeper: LoadKeeper, requests: int, prompt: int = 100, answer: int = 27) -> None:
    for request in range(requests):
        keeper.begin(request, prompt, 1)
    for request in range(requests):
        keeper.count([Delta(request, 0, tokens=(7,) * (answer - 1))])
        keeper.count([Delta(request, 0, tokens=(7,), finish="stop")])


def test_what_is_counted(checkpoint: Any) -> None:
    keeper = LoadKeeper(checkpoint, CONTEXT)
    keeper.begin(1, 100, 2)
    keeper.begin(2, 10, 1)
    keeper.begin(3, 50, 1)
    keeper.forget(3)
    keeper.forget(3)
    keeper.count([Delta(1, 0, tokens=(5, 6)), Delta(2, 0, tokens=(5,))])
    keeper.count([Delta(1, 0, tokens=(5,), finish="stop"), Delta(1, 1, finish="length"), Delta(9, 0, finish="stop")])
    keeper.begin(4, 1, 1)
    keeper.count([Delta(2, 0, finish="abort"), Delta(4, 0, finish="error", error="x")])
    keeper.save()
    seen = read_seen(checkpoint)
    assert seen is not None
    assert seen.length.steps == {step_of(103): 2, step_of(11): 1}, "an error is no load"
    assert seen.answer.steps == {3: 1, 0: 1, 1: 1}
    assert seen.at_once.steps == {2: 2, 3: 1, 4: 1}
    assert (seen.requests, seen.length.most, seen.at_once.most) == (3, 103, 4)
    assert not keeper._live
    assert keeper._choices == 0


def test_the_file_holds_counts_only_and_stays_small(checkpoint: Any) -> None:
    keeper = LoadKeeper(checkpoint, CONTEXT)
    choose = random.Random(1)
    for request in range(3000):
        keeper.begin(request, choose.randrange(1, 200_000), 1)
        if request % 3:
            keeper.count([Delta(request, 0, tokens=(31337,) * choose.randrange(2000), text="secret", finish="stop")])
    keeper.save()
    text = load_file(checkpoint).read_text()
    assert set(json.loads(text)) == {"version", "since", "prompt", "answer", "length", "at_once"}
    assert "31337" not in text.replace('"most"', "")
    assert "secret" not in text
    assert len(text) < past_load.FILE_BYTES / 8
    assert [p.name for p in load_file(checkpoint).parent.iterdir()] == [load_file(checkpoint).name]


def test_savings_add_up_and_old_load_fades(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        keeper = LoadKeeper(checkpoint, CONTEXT)
        run(keeper, 60)
        keeper.save()
        keeper.save()
    assert read_seen(checkpoint).requests == 120  # type: ignore[union-attr]
    monkeypatch.setattr(past_load, "MOST", 150)
    for _ in range(6):
        run(keeper, 60, prompt=1000)
        keeper.save()
    seen = read_seen(checkpoint)
    assert seen is not None
    assert 75 <= seen.requests <= 150
    assert seen.length.steps.get(step_of(127), 0) < 10


def test_no_text_needs_more_than_the_context(checkpoint: Any) -> None:
    keeper = LoadKeeper(checkpoint, 512)
    run(keeper, past_load.LEAST, prompt=1000)
    run(keeper, past_load.LEAST, prompt=500)
    keeper.save()
    seen = read_seen(checkpoint)
    assert seen is not None
    assert (seen.prompt.most, seen.length.most, seen.answer.most) == (512, 512, 27)


def test_too_little_proves_nothing(checkpoint: Any) -> None:
    keeper = LoadKeeper(checkpoint, CONTEXT)
    run(keeper, past_load.LEAST - 1)
    keeper.save()
    assert read_seen(checkpoint).demand() is None  # type: ignore[union-attr]
    run(keeper, 1)
    keeper.save()
    demand = read_seen(checkpoint).demand()  # type: ignore[union-attr]
    assert demand is not None
    assert (demand.length, demand.at_once) == (127, past_load.LEAST - 1)


WHOLE = Seen().told() | {"since": "2026-01-31"}


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", "[" * 100_000, '{"version": 1}', b"\xff\xfe", "x" * (past_load.FILE_BYTES + 1),
        json.dumps(WHOLE)[:-9],
        json.dumps(WHOLE | {"version": 2}),
        json.dumps(WHOLE | {"since": 5}),
        json.dumps(WHOLE | {"since": "x" * 11}),
        json.dumps(WHOLE | {"answer": {"most": -1, "steps": []}}),
        json.dumps(WHOLE | {"answer": {"most": 1, "steps": [[1]]}}),
        json.dumps(WHOLE | {"answer": {"most": 1, "steps": [[1, "2"]]}}),
        json.dumps(WHOLE | {"answer": {"most": 1, "steps": [[10**6, 2]]}}),
        json.dumps(WHOLE | {"answer": {"most": 1, "steps": [[1, -2]]}}),
        json.dumps(WHOLE | {"answer": {"most": 1.5, "steps": []}}),
    ],
)  # fmt: skip
def test_a_torn_or_foreign_file_is_left_out_with_one_warning_and_replaced(
    text: str | bytes, checkpoint: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = load_file(checkpoint)
    path.parent.mkdir(parents=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert read_seen(checkpoint) is None
    assert len(caplog.records) == 1
    assert str(path) in caplog.text
    keeper = LoadKeeper(checkpoint, CONTEXT)
    run(keeper, 60)
    keeper.save()
    assert read_seen(checkpoint).requests == 60  # type: ignore[union-attr]
    assert len(caplog.records) == 1


def test_a_pipe_or_link_in_its_place_is_not_waited_for_nor_followed(checkpoint: Any, tmp_path: Path) -> None:
    path = load_file(checkpoint)
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    assert read_seen(checkpoint) is None
    path.unlink()
    (tmp_path / "other").write_text(json.dumps(WHOLE))
    path.symlink_to(tmp_path / "other")
    assert read_seen(checkpoint) is None


def test_what_another_process_keeps_from_being_saved_waits(checkpoint: Any) -> None:
    keeper = LoadKeeper(checkpoint, CONTEXT)
    run(keeper, 60)
    folder = load_file(checkpoint).parent
    folder.mkdir(parents=True)
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    keeper.save()
    assert not load_file(checkpoint).exists()
    os.close(descriptor)
    keeper.save()
    assert read_seen(checkpoint).requests == 60  # type: ignore[union-attr]


def test_a_folder_that_cannot_be_made_is_a_warning(checkpoint: Any, caplog: pytest.LogCaptureFixture) -> None:
    load_file(checkpoint).parent.parent.mkdir(parents=True)
    load_file(checkpoint).parent.write_text("no folder")
    keeper = LoadKeeper(checkpoint, CONTEXT)
    run(keeper, 60)
    keeper.save()
    assert "past load is not kept" in caplog.text


def test_a_running_engine_saves_now_and_then(checkpoint: Any) -> None:
    now = [0.0]
    keeper = LoadKeeper(checkpoint, CONTEXT, clock=lambda: now[0])
    run(keeper, 60)
    assert not load_file(checkpoint).exists()
    now[0] = past_load.SAVE_S
    run(keeper, 1)
    for thread in threading.enumerate():
        if thread.name == "headrace-past-load":
            thread.join()
    assert read_seen(checkpoint).requests == 60  # type: ignore[union-attr]
    keeper.save()
    assert read_seen(checkpoint).requests == 61  # type: ignore[union-attr]


# with an engine


PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def test_an_engine_keeps_its_load_and_the_next_takes_its_proposal(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_came = threading.Event()
    begin, count = LoadKeeper.begin, LoadKeeper.count

    def beginning(keeper: LoadKeeper, request: int, prompt: int, choices: int) -> None:
        begin(keeper, request, prompt, choices)
        if keeper._choices == 80:
            all_came.set()

    def counting(keeper: LoadKeeper, deltas: list[Delta]) -> None:
        assert all_came.wait(30), "no first answer ends before the last request came"
        count(keeper, deltas)

    monkeypatch.setattr(LoadKeeper, "begin", beginning)
    monkeypatch.setattr(LoadKeeper, "count", counting)
    with LLM(folder, threads=1, memory="auto") as llm:
        plan = llm.model.plan.memory.plan
        assert (plan.chosen, plan.proposal, plan.rows) == ("default", None, 64), "no evidence: the default"
        llm.generate([[3] * 20] * 80, PARAMS)
        llm.generate([3] * 30, SamplingParams(temperature=1, n=3, max_tokens=2, ignore_eos=True))
    checkpoint = llm.model.checkpoint
    seen = read_seen(checkpoint)
    assert seen is not None
    assert (seen.requests, seen.prompt.total, seen.at_once.most) == (83, 81, 80)
    assert seen.length.most == 32
    shown = plan_engine(folder, Options.of(threads=1)).memory.plan
    assert (shown.chosen, shown.rows) == ("default", 64)
    assert shown.proposal is not None
    with LLM(folder, threads=1, memory="auto") as llm:
        plan = llm.model.plan.memory.plan
        assert plan.chosen == "past load"
        assert (plan.blocks, plan.rows) == (shown.proposal.blocks, shown.proposal.rows)
        assert llm.model.plan.options.scheduler.rows == plan.rows == 100
        assert llm.model._engine._scheduler.rows == plan.rows
        assert len(llm.generate([[3] * 20] * 5, PARAMS)) == 5
    assert read_seen(checkpoint).requests == 88  # type: ignore[union-attr]


def test_nothing_is_kept_where_that_is_switched_off_or_nothing_came(folder: Path) -> None:
    with LLM(folder, threads=1, past_load=False) as llm:
        llm.generate([3] * 20, PARAMS)
    with LLM(folder, threads=1) as llm:
        pass
    with pytest.raises(EngineDeadError):
        llm.generate([3] * 20, PARAMS)
    assert llm.model._keeper is not None
    assert not llm.model._keeper._live, "a request that nobody serves is no load"
    assert not load_file(llm.model.checkpoint).exists()


def test_a_broken_record_does_not_keep_a_model_from_loading(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = load_file(plan_engine(folder, Options()).checkpoint)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{")
    with caplog.at_level(logging.WARNING), LLM(folder, threads=1, memory="auto") as llm:
        assert llm.model.plan.memory.plan.chosen == "default"
    assert len(caplog.records) == 1


# the plan of an engine


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process counts the same in every plan of a test, and the plans know."""
    now = resident()
    monkeypatch.setattr("headrace.engine.build.resident", lambda: now)
    monkeypatch.setattr("headrace.engine.build.GRAIN", 1)


@pytest.mark.usefixtures("steady")
def test_too_little_is_refused_before_weights_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr("headrace.engine.build.load_weights", read)
    for memory in ("1MB", "30MB"):
        with pytest.raises(OptionError, match=r"at least [0-9]+MB for 32 tokens") as error:
            LLM(folder, memory=memory)
        assert error.value.option == "memory"
    with pytest.raises(OptionError, match="memory is 1000000000MB, but this process may hold") as error:
        LLM(folder, memory="1000TB")
    needs = plan_engine(folder, Options()).memory.plan.needs
    tight = needs.fixed + 3 * needs.block + needs.slack
    with pytest.raises(OptionError, match="What would fit: context 96 for one request at a time") as error:
        LLM(folder, memory=str(tight))
    assert error.value.option == "memory"
    with pytest.raises(OptionError, match="it can be at most") as error:
        LLM(folder, memory=str(tight), pool_bytes=4 * needs.block)
    assert error.value.option == "pool_bytes"
    with pytest.raises(AssertionError, match="weights are read"):
        LLM(folder, memory=str(tight), context=96)


@pytest.mark.usefixtures("steady")
def test_a_small_control_group_is_refused_by_the_context(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = plan_engine(folder, Options()).memory.plan.needs
    now = resident()
    own = 0 if now is None else now.anonymous
    monkeypatch.setattr(
        "headrace.engine.build.granted_memory", lambda: (needs.fixed + needs.slack) * 16 // 15 + 4 * needs.block - own
    )
    with pytest.raises(OptionError, match=r"are free here: .* What would fit: context") as error:
        LLM(folder)
    assert error.value.option == "context"


@pytest.mark.usefixtures("steady")
def test_an_engine_within_a_bound_works(folder: Path) -> None:
    needs = plan_engine(folder, Options()).memory.plan.needs
    with LLM(folder, threads=1, memory=str(needs.fixed + 40 * needs.block)) as llm:
        plan = llm.model.plan.memory.plan
        assert 16 <= plan.blocks <= 40
        assert plan.total <= plan.limit
        assert llm.model.stats().blocks_total == plan.blocks
        assert len(llm.generate([[3] * 100] * 20, PARAMS)) == 20
