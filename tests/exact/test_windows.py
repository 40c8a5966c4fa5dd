"""Texts longer than the context: every token is the one that its window alone gives, to the last bit, whatever runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.engine.outputs import Logprobs
from headrace.scheduler.windows import SINKS
from tests.exact.test_engine import told

CONTEXT = 80
HALF = CONTEXT // 2
COMMON: dict[str, Any] = {"threads": 2, "context": CONTEXT, "pool_bytes": 1 << 23, "weight_cache": False}
LENGTHS = (1, CONTEXT - 30, CONTEXT - 1, CONTEXT, CONTEXT + 1, CONTEXT + HALF, 3 * CONTEXT + 7)
GREEDY = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, logprobs=2)
SEEDED = replace(
    GREEDY, temperature=0.9, seed=4, n=2, max_tokens=130, frequency_penalty=0.6, repetition_penalty=1.1, min_tokens=90
)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(12)
    return [rng.integers(0, 256, length).tolist() for length in LENGTHS]


def window(text: Sequence[int], overflow: str) -> list[int]:
    """What the token after `text` is chosen from."""
    sinks = SINKS if overflow == "sinks" else 0
    left_out = 0
    while len(text) - left_out >= CONTEXT:
        left_out += HALF
    return [*text[:sinks], *text[sinks + left_out :]] if left_out else list(text)


def numbers(logprobs: Logprobs | None) -> list[dict[int, float]]:
    """Without the texts, which depend on the tokens before."""
    return [{token: one.logprob for token, one in position.items()} for position in logprobs or ()]


@pytest.fixture(params=["k_quants", "bf16_windows"])
def path(request: pytest.FixtureRequest, tiny_path: Callable[[str], Path]) -> Path:
    return tiny_path(request.param)


@pytest.mark.parametrize("overflow", ["sliding", "sinks"])
def test_each_token_is_that_of_its_window_alone(path: Path, overflow: str) -> None:
    one = replace(GREEDY, max_tokens=1)
    with LLM(path, **COMMON) as llm:
        for output in llm.generate(prompts(), replace(GREEDY, overflow=overflow)):
            [choice] = output.outputs
            assert (choice.finish_reason, len(choice.token_ids)) == ("length", 100)
            text = [*output.prompt_token_ids, *choice.token_ids]
            begin = len(output.prompt_token_ids)
            alone = llm.generate([window(text[:end], overflow) for end in range(begin, len(text))], one)
            assert [a.outputs[0].token_ids for a in alone] == [[token] for token in choice.token_ids]
            assert [numbers(a.outputs[0].logprobs) for a in alone] == [numbers([one]) for one in choice.logprobs or ()]


@pytest.mark.parametrize("overflow", ["sliding", "sinks"])
def test_log_probabilities_of_a_prompt_come_from_overlapping_windows(path: Path, overflow: str) -> None:
    text = prompts()[-1]
    asked = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=1, overflow=overflow)
    with LLM(path, budget=33, **COMMON) as llm:
        [output] = llm.generate(text, asked)
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(text)
        for end in range(1, len(text)):
            [alone] = llm.generate([*window(text[:end], overflow), text[end]], replace(asked, max_tokens=0))
            assert alone.prompt_logprobs is not None
            assert output.prompt_logprobs[end] == alone.prompt_logprobs[-1], end
        plain = llm.generate(text, replace(asked, prompt_logprobs=None))[0]
        assert output.outputs[0].token_ids == plain.outputs[0].token_ids


def test_windows_do_not_see_what_else_runs(path: Path) -> None:
    asked = [replace(SEEDED, overflow=("sliding", "sinks")[i % 2]) for i in range(len(LENGTHS))]
    with LLM(path, prefix_cache=False, **COMMON) as llm:
        want = [told(llm.generate(p, params)[0]) for p, params in zip(prompts(), asked, strict=True)]
        memory, groups = llm.model.plan.memory, len(llm.model.plan.program.kv.groups)
    for options in ({}, {"budget": 7, "threads": 1}, {"pool_bytes": 7 * groups * memory.pool.block_bytes}):
        with LLM(path, **COMMON | options) as llm:
            assert [told(output) for output in llm.generate(prompts(), asked)] == want
            stats = llm.model.stats()
            assert stats.preemptions > 0 or "pool_bytes" not in options
            assert (stats.running, stats.blocks_used) == (0, 0)


def test_windows_leave_nothing_in_the_cache(path: Path) -> None:
    long = prompts()[-1]
    with LLM(path, **COMMON) as llm:
        for overflow in ("sliding", "sinks"):
            llm.generate(long, replace(GREEDY, overflow=overflow, max_tokens=5))
            assert llm.model.stats().blocks_idle == 0
        short = llm.generate(long[:70], replace(GREEDY, overflow="sliding"))[0]
        kept = llm.model.stats().blocks_idle
        groups = len(llm.model.plan.program.kv.groups)
        assert 0 < kept <= groups * -(-CONTEXT // 32), "only the text before the first window was full"
        again = llm.generate(long[:70], replace(GREEDY, overflow="sliding"))[0]
        assert told(again) == told(short)
        assert again.outputs[0].timings is not None and again.outputs[0].timings.cached >= 64


def test_a_middle_is_left_out(path: Path) -> None:
    long = prompts()[-1]
    with LLM(path, **COMMON) as llm:
        cut = SamplingParams(temperature=0, max_tokens=21, ignore_eos=True, overflow="truncate-middle")
        output = llm.generate(long, cut)[0]
        assert output.prompt_token_ids == long[:30] + long[-29:]
        assert len(output.outputs[0].token_ids) == 21
        same = llm.generate(output.prompt_token_ids, replace(cut, overflow="error"))[0]
        assert told(same) == told(output)
