"""Whoever is cancelled beside a request, and whenever: not a bit of its answer changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from tests.exact.test_engine import told
from tests.exact.watched import ANSWERING, PARTLY_DONE, QUEUED, READING, Watched

PLAIN: dict[str, Any] = {"context": 384, "weight_cache": False, "past_load": False}
STAYS = SamplingParams(temperature=8, seed=9, max_tokens=40, ignore_eos=True, logprobs=2)
LEAVES = SamplingParams(temperature=8, seed=1, max_tokens=120, ignore_eos=True)
THREE = SamplingParams(temperature=8, seed=1, n=3, max_tokens=120, stop_token_ids=range(0, 256, 3))
"""Its choices end one after the other."""
STATES = (READING, ANSWERING, PARTLY_DONE, QUEUED)
BASE = np.random.default_rng(2).integers(0, 256, 130).tolist()


def together() -> tuple[list[list[int]], list[str | None]]:
    """Prompts, and in which state each is cancelled. All but the stayers' ends may be what somebody beside them has
    just begun to compute, and does not finish."""
    rng = np.random.default_rng(5)
    prompts, states = list[list[int]](), list[str | None]()
    for number in range(24):
        length = int(rng.choice([0, 20, 32, 64, 100, 130]))
        prompts.append(BASE[:length] + rng.integers(0, 256, int(rng.integers(1, 30))).tolist())
        states.append(None if number % 3 == 2 else STATES[(number - number // 3) % 4])
        if states[-1] == READING:
            prompts[-1] = [*BASE, *rng.integers(0, 256, 100).tolist()]
    return prompts, states


@pytest.mark.parametrize("kv_format", ["bf16", "int4"])
@pytest.mark.parametrize("name", ["k_quants", "bf16_windows"])
@pytest.mark.parametrize("blocks", [60, 12], ids=["", "crowded"])
def test_neighbours_that_are_cancelled(
    name: str, kv_format: str, blocks: int, tiny_path: Callable[[str], Path], tmp_path: Path
) -> None:
    path, options = tiny_path(name), PLAIN | {"kv_format": kv_format}
    prompts, states = together()
    stay = [number for number, state in enumerate(states) if state is None]
    with LLM(path, **options, threads=1, prefix_cache=False, pool_bytes=1 << 24) as llm:
        want = [told(llm.generate(prompts[number], STAYS)[0]) for number in stay]
        pool = blocks * llm.model.plan.memory.token * 32
    params = [{None: STAYS, PARTLY_DONE: THREE}.get(state, LEAVES) for state in states]
    with LLM(path, **options, threads=2, pool_bytes=pool, budget=24, rows=7, cache_dir=str(tmp_path)) as llm:
        for _ in range(2):  # the second time they find what the first left
            watched = Watched(llm.model)
            first = llm.model.new_id() + 1
            watched.leaves = {first + number: state for number, state in enumerate(states) if state is not None}
            got = llm.generate(prompts, params)
            assert [told(got[number]) for number in stay] == want
        assert min(watched.left[state] for state in STATES) >= 2, watched.left
        assert llm.model.stats().aborts >= 16
