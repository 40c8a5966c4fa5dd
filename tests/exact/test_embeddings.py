"""Embeddings are the same bits alone and in company, whole and in chunks, after preemptions, cold and warm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, EmbeddingOutput, SamplingParams
from headrace.engine.embedding import embedding_params
from tests.exact.test_engine import WAYS

COMMON: dict[str, Any] = {"context": 256, "weight_cache": False}
POOLINGS = ("mean", "last")


def prompts() -> list[list[int]]:
    """Some begin alike, at and beside the borders of blocks; some are as long as the context."""
    rng = np.random.default_rng(9)
    base = rng.integers(0, 256, 256).tolist()
    own = [rng.integers(0, 256, n).tolist() for n in (1, 5, 31, 32, 33, 80, 130)]
    return [*own, *([*base[:n], n % 7] for n in (31, 32, 63, 64, 65, 200)), base, base[:100] + own[5]]


def bits(outputs: list[EmbeddingOutput]) -> list[bytes]:
    vectors = [np.array(o.embedding, np.float32) for o in outputs]
    assert all(np.isfinite(v).all() and v.any() for v in vectors)
    return [v.tobytes() for v in vectors]


def raw(llm: LLM, ids: list[list[int]], pooling: str) -> list[bytes]:
    """As they come from the model."""
    return bits(llm.embed(ids, pooling, normalize=False))


@pytest.mark.parametrize("name", ["k_quants", "blocks_of_32", "bf16_windows"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_the_same_bits_however_they_run(name: str, pooling: str, tiny_path: Callable[[str], Path]) -> None:
    path = tiny_path(name)
    with LLM(path, threads=1, pool_bytes=1 << 24, prefix_cache=False, budget=512, **COMMON) as llm:
        want = [raw(llm, [p], pooling)[0] for p in prompts()]
        block = llm.model.plan.memory.pool.block_bytes * len(llm.model.plan.program.kv.groups)
    assert len(set(want)) == len(prompts())
    for way, options in WAYS.items():
        with LLM(path, pool_bytes=1 << 24, **COMMON, **options) as llm:
            assert raw(llm, prompts(), pooling) == want, way
            assert raw(llm, prompts(), pooling) == want, f"{way}, warm"
            cached = [o.cached for o in llm.embed(prompts(), pooling)]
            assert any(cached) == (pooling == "last"), "a mean computes all of its tokens, the last may read"
    with LLM(path, threads=2, pool_bytes=9 * block, budget=48, **COMMON) as llm:
        beside(llm, pooling, want)
        windows = any(group.window for group in llm.model.plan.program.kv.groups)  # they give blocks back early
        assert windows or llm.model.stats().preemptions > 0


def beside(llm: LLM, pooling: str, want: list[bytes]) -> None:
    """Among answers, in a pool that is too small for all."""
    answers = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True)
    asked = embedding_params(pooling)
    params = [p for _ in prompts() for p in (asked, answers)]
    both = [p for prompt in prompts() for p in (prompt, prompt[:90])]
    outputs = llm.generate(both, params)
    got = [np.array(o.embedding, np.float32).tobytes() for o in outputs[::2]]
    assert got == want
    alone = [llm.generate(p, answers)[0].outputs[0].token_ids for p in both[1::2]]
    assert [o.outputs[0].token_ids for o in outputs[1::2]] == alone, "nor do embeddings change answers"


def test_what_embeddings_compute_others_read(tiny_path: Callable[[str], Path]) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    prompt = prompts()[11]
    with LLM(tiny_path("bf16_windows"), pool_bytes=1 << 24, **COMMON) as llm:
        cold = llm.generate(prompt, greedy)[0].outputs[0]
    with LLM(tiny_path("bf16_windows"), pool_bytes=1 << 24, **COMMON) as llm:
        llm.embed(prompt, "mean")
        warm = llm.generate(prompt, greedy)[0].outputs[0]
        assert warm.timings is not None and warm.timings.cached >= len(prompt) // 32 * 32
        assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)
