"""The promise through the whole engine: tokens, and log-probabilities to the last bit, greedy and seeded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, RequestOutput, SamplingParams, native
from tests.models.tiny import VOCAB, tiny_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=4, prompt_logprobs=2)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=33, ignore_eos=True, logprobs=4)
LONGER = SamplingParams(temperature=0.8, seed=2, max_tokens=120, ignore_eos=True, logprobs=1)
THREE = SamplingParams(temperature=1.2, seed=-3, n=3, max_tokens=9, ignore_eos=True, logprobs=0)


def told(output: RequestOutput) -> tuple[object, ...]:
    """Everything that was computed."""
    choices = [(c.token_ids, c.logprobs, c.cumulative_logprob, c.finish_reason) for c in output.outputs]
    return choices, output.prompt_logprobs, output.embedding


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(4)
    return [rng.integers(0, 256, int(rng.choice([1, 5, 31, 32, 33, 80]))).tolist() for _ in range(24)]


PARAMS = [(GREEDY, SEEDED, THREE)[i % 3] for i in range(24)]
WAYS: dict[str, dict[str, Any]] = {
    "two at a time": {"rows": 2, "threads": 2},
    "seven at a time, budget 16": {"rows": 7, "budget": 16, "threads": 3},
    "32 at a time, budget 33": {"rows": 32, "budget": 33, "threads": 2},
    "no fusion": {"rows": 32, "fusion": False, "threads": 2},
    "one token a step": {"rows": 4, "budget": 1, "threads": 1},
    **{isa: {"isa": isa, "threads": 2, "budget": 64} for isa in native.isas()[1:]},
}


@pytest.mark.parametrize("name", ["k_quants", "blocks_of_32", "bf16_windows"])
def test_requests_do_not_see_each_other(name: str, tiny_path: Callable[[str], Path]) -> None:
    path, common = tiny_path(name), dict[str, Any](weight_cache=False, context=256)
    with LLM(path, threads=1, pool_bytes=1 << 24, **common) as llm:
        want = [told(llm.generate(p, params)[0]) for p, params in zip(prompts(), PARAMS, strict=True)]
        block = llm.model.plan.memory.pool.block_bytes
        groups = len(llm.model.plan.program.kv.groups)
    assert len({str(answer) for answer in want}) == 24
    for way, options in WAYS.items():
        with LLM(path, pool_bytes=1 << 24, **common, **options) as llm:
            assert answers(llm) == want, way
    with LLM(path, pool_bytes=9 * groups * block, threads=2, budget=48, **common) as llm:
        assert answers(llm) == want, "in a small pool"
        longer = [told(llm.generate(p, LONGER)[0]) for p in prompts()[:6]]
        assert [told(output) for output in llm.generate(prompts()[:6][::-1], LONGER)][::-1] == longer, "preempted"
        assert llm.model.stats().preemptions > 0


def answers(llm: LLM) -> list[tuple[object, ...]]:
    return [told(output) for output in llm.generate(prompts(), PARAMS)]


# ---- case K5: what the scheduler gives back, and when, with the kernels that read the rest


@pytest.mark.parametrize("window", [48, 64], ids=["1.5 blocks", "2 blocks"])
def test_k5_where_a_window_is_first_full(window: int, tmp_path: Path) -> None:
    """Prompts of every length about the window and twice the window, 20 tokens each, in chunks of the budget's size,
    alone or all of them together; and near the float32 reference on every token."""
    path = tiny_checkpoint(tmp_path, "gemma3_text", sliding_window=window)
    rng = np.random.default_rng(window)
    lengths = [*range(window - 2, window + 3), *range(2 * window - 2, 2 * window + 3)]
    prompts = [rng.integers(0, 256, length).tolist() for length in lengths]
    common = dict[str, Any](context=256, threads=2, weight_cache=False, pool_bytes=1 << 24)
    with LLM(path, budget=200, **common) as llm:
        want = [told(llm.generate(p, GREEDY)[0]) for p in prompts]
    for budget in (1, 16, 33, window, window + 1):
        with LLM(path, budget=budget, **common) as llm:
            together = [told(output) for output in llm.generate(prompts, GREEDY)]
            assert together == want, budget
            if budget > 1:
                assert [told(llm.generate(p, GREEDY)[0]) for p in prompts] == want, budget
    with LLM(path, kv_format="f32", **common) as llm, LLM(path, kv_format="f32", backend="torch", **common) as other:
        whole = [prompt + list(choices[0][0]) for prompt, (choices, *_) in zip(prompts, want, strict=True)]
        once = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        for ours, theirs in zip(llm.generate(whole, once), other.generate(whole, once), strict=True):
            assert values(ours) == pytest.approx(values(theirs), abs=1e-3)


def values(output: RequestOutput) -> list[float]:
    """Log-probabilities of the prompt's tokens."""
    assert output.prompt_logprobs is not None
    return [of[t].logprob for of, t in zip(output.prompt_logprobs, output.prompt_token_ids, strict=True) if of]


# ---- case V2: ids at the edge of a line of logits; those beyond it are refused (tests/serve/test_cases_live.py)


def test_v2_the_last_ids_do_not_touch_the_next_line(tiny_path: Callable[[str], Path]) -> None:
    """A stands between two requests that write to both ends of their own lines, which lie beside its own."""
    plain = {"max_tokens": 24, "ignore_eos": True, "logprobs": 3}
    edges = SamplingParams(**plain, temperature=0, logit_bias={VOCAB - 1: 100, 0: -100}, stop_token_ids=[0])
    low = SamplingParams(**plain, temperature=1, min_tokens=24, logit_bias={0: 100, VOCAB - 1: -100})
    with LLM(tiny_path("k_quants"), threads=2, context=256, pool_bytes=1 << 24, weight_cache=False) as llm:
        for a in (
            SamplingParams(**plain, temperature=0, min_tokens=24),
            SamplingParams(**plain, temperature=1, seed=5),
        ):
            alone = told(llm.generate([[7, 8, 9]], a)[0])
            for before, after in permutations((edges, low, SamplingParams(**plain, temperature=0)), 2):
                outputs = llm.generate([[5, VOCAB - 1], [7, 8, 9], [0, 5]], [before, a, after])
                assert told(outputs[1]) == alone
                assert before is not edges or set(outputs[0].outputs[0].token_ids) == {VOCAB - 1}


# ---- case P1, on a real model

A = SamplingParams(temperature=0.8, seed=42, max_tokens=16, ignore_eos=True, logprobs=2)
QUESTION = "The seven colours of the rainbow are"
OTHERS = ["Once upon a time", "def main():\n", "2 + 2 =", "The capital of France is", "Dear Sir", "It rained", "9 8 7"]


def test_p1_a_seeded_request_is_the_same_beside_anyone(smollm2: Path) -> None:
    with LLM(smollm2, context=512, threads=2, pool_bytes=1 << 27) as llm:
        first = told(llm.generate(QUESTION, A)[0])
        greedy = llm.generate(QUESTION, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))[0]
        assert first[0][0][0] != greedy.outputs[0].token_ids, "the seed must matter"  # type: ignore[index]
        assert [told(llm.generate(QUESTION, A)[0]) for _ in range(3)] == [first] * 3
        for seed in (None, 7):
            beside = SamplingParams(temperature=0.8, seed=seed, max_tokens=12, ignore_eos=True)
            for _ in range(4):
                assert told(llm.generate([QUESTION, OTHERS[0]], [A, beside])[0]) == first
        for place in range(8):
            batch: list[str] = [*OTHERS[:place], QUESTION, *OTHERS[place:]]
            unseeded = SamplingParams(temperature=0.8, max_tokens=4 + place, ignore_eos=True)
            params = [A if p is QUESTION else unseeded for p in batch]
            assert told(llm.generate(batch, params)[place]) == first, place
        check_seeds(llm)
        block = llm.model.plan.memory.pool.block_bytes
    crowd = [QUESTION, *(f"{text}, and {'so on, ' * 7}" for text in OTHERS)]
    longer = SamplingParams(temperature=0.8, seed=42, max_tokens=40, ignore_eos=True)
    with LLM(smollm2, context=512, threads=2, pool_bytes=1 << 27) as llm:
        alone = [told(llm.generate(text, longer)[0]) for text in crowd[-2:]]
    with LLM(smollm2, context=512, threads=2, pool_bytes=7 * block) as llm:
        together = llm.generate(crowd, [A, *[longer] * 7])
        assert llm.model.stats().preemptions > 0
        assert told(together[0]) == first
        assert [told(output) for output in together[-2:]] == alone


def check_seeds(llm: LLM) -> None:
    """n=3 with one seed: three different choices, the same three each time. Seeds at the ends of their range count."""

    def choices(seed: int) -> list[Sequence[int]]:
        params = SamplingParams(temperature=0.8, seed=seed, n=3, max_tokens=8, ignore_eos=True)
        return [choice.token_ids for choice in llm.generate(QUESTION, params)[0].outputs]

    seen = {seed: choices(seed) for seed in (0, -5, 42, 2**63 - 1)}
    for seed, three in seen.items():
        assert [choices(seed) for _ in range(2)] == [three] * 2
        assert len({tuple(c) for c in three}) == 3
    assert len({str(three) for three in seen.values()}) == 4
