"""The policies on a real executor: the same answers, when they begin, and lists longer than any queue."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, AsyncLLM, OverloadedError, SamplingParams
from tests.models.tiny import tiny_checkpoint

PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=12, ignore_eos=True)
PROMPTS = [[(7 * i + j) % 60 + 3 for j in range(5 + i)] for i in range(8)]
WAYS = {
    "static": {"policy": "static", "batch_size": 4},
    "dynamic": {"policy": "dynamic", "batch_size": 3, "max_wait_ms": 50},
    "a short queue": {"queue_requests": 1, "queue_tokens": 1, "rows": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", num_hidden_layers=1)


def answers(folder: Path, **options: Any) -> list[list[int]]:
    with LLM(folder, threads=1, pool_bytes=1 << 22, **options) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("way", WAYS)
def test_when_requests_begin_changes_no_answer(way: str, folder: Path) -> None:
    """A list handed to `LLM` is answered however long it is: the limits are for strangers."""
    assert answers(folder, **WAYS[way]) == answers(folder)


def test_a_batch_begins_in_time(folder: Path) -> None:
    with LLM(folder, threads=1, pool_bytes=1 << 22, policy="dynamic", batch_size=2, max_wait_ms=300) as llm:
        llm.generate(PROMPTS[:2], PARAMS)
        began = time.monotonic()
        llm.generate(PROMPTS[:4], PARAMS)
        full = time.monotonic() - began
        timings = llm.generate(PROMPTS[:1], PARAMS)[0].outputs[0].timings
    assert timings is not None
    assert full < 0.3 <= timings.queued_s < 2


def test_async_requests_above_the_limit(folder: Path) -> None:
    llm = AsyncLLM(folder, threads=1, pool_bytes=1 << 22, rows=1, queue_requests=2)

    async def ask() -> list[Any]:
        asked = (llm.generate(prompt, PARAMS, tenant=f"{i}") for i, prompt in enumerate(PROMPTS))
        return await asyncio.gather(*asked, return_exceptions=True)

    got = asyncio.run(ask())
    refused = [one for one in got if isinstance(one, OverloadedError)]
    assert 0 < len(refused) == llm.stats().refused < len(PROMPTS)
    assert all(one.finished for one in got if one not in refused)
    llm.close()
