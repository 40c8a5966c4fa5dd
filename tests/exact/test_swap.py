"""A preempted request's blocks go to the disk and come back: not a bit of any answer changes, and nothing that came
back is computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, RequestOutput, SamplingParams
from headrace.cache.blocks import Blocks
from headrace.config import KV_FORMATS
from headrace.execute.moving import Mover
from headrace.execute.plan import Move, Moved
from headrace.scheduler.pace import Pace
from tests.exact.test_engine import told
from tests.exact.watched import Watched

PLAIN: dict[str, Any] = {"context": 256, "weight_cache": False, "past_load": False}
PROMPTS = [
    np.random.default_rng(n).integers(0, 256, length).tolist()
    for n, length in enumerate((9, 20, 12, 33, 5, 16, 26, 7, 29, 14))
]
"""Nobody shares anything with another."""
MOST = 130
WAYS = (
    SamplingParams(temperature=8, seed=4, max_tokens=MOST, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.9, max_tokens=MOST, logprobs=2),
)
PARAMS = [WAYS[n % 2] for n in range(len(PROMPTS))]


class SlowToCompute(Pace):
    """Whatever is on the disk is sooner read than computed, on any machine."""

    token_s = 1.0  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def moves_end_with_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run beside it as ever; but what is there in the end does not depend on how fast the disk is."""
    begin, over, open_ = Mover.begin, Mover.over, Counter[Mover]()

    def begun(self: Mover, move: Move) -> None:
        open_[self] += 1
        begin(self, move)

    def all_over(self: Mover, *, wait: bool) -> tuple[Moved, ...]:
        moved: tuple[Moved, ...] = ()
        while len(moved) < open_[self]:
            moved += over(self, wait=True)
        open_[self] = 0
        return moved

    monkeypatch.setattr(Mover, "begin", begun)
    monkeypatch.setattr(Mover, "over", all_over)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("name", ["k_quants", "blocks_of_32", "bf16_windows"])
def test_swapped_out_and_in(name: str, kv_format: str, tiny_path: Callable[[str], Path], tmp_path: Path) -> None:
    """The pool has room for four of them at their longest. Without a disk they are computed again, to the same end."""
    path, options = tiny_path(name), PLAIN | {"kv_format": kv_format}
    with LLM(path, **options, threads=1, prefix_cache=False, pool_bytes=1 << 24) as llm:
        want = [told(llm.generate(p, params)[0]) for p, params in zip(PROMPTS, PARAMS, strict=True)]
        plan = llm.model.plan
    blocks = Blocks(1, [group.window for group in plan.program.kv.groups])
    pool = int(4 * blocks.need(max(map(len, PROMPTS)) + MOST)) * plan.memory.pool.block_bytes
    for folder in (None, str(tmp_path)):
        with LLM(path, **options, threads=2, pool_bytes=pool, budget=48, cache_dir=folder) as llm:
            watched = Watched(llm.model)
            watched.scheduler.pace = SlowToCompute()
            got = llm.generate(PROMPTS, PARAMS)
            stats = llm.model.stats()
        assert [told(output) for output in got] == want
        assert stats.preemptions > 0
        assert preemptions(got) == stats.preemptions
        assert bool(watched.back) == (folder is not None), "they came back"
        assert bool(stats.tier_loads) == (folder is not None)
    assert {back.answer for back in watched.back} == {False, True}, "of prompts and of answers"
    assert stats.tier_saves >= stats.tier_loads >= len(watched.back)


def preemptions(outputs: list[RequestOutput]) -> int:
    timings = [choice.timings for output in outputs for choice in output.outputs]
    return sum(t.preemptions for t in timings if t is not None)
