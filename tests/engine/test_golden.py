"""Real models answer as transformers does on the same weights in float32: see tests/golden/make.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, RequestOutput, SamplingParams

GOLDEN = Path(__file__).parents[1] / "golden"
MODELS = {
    "smollm2-135m": "smollm2-135m-instruct-q4_1",
    "gemma3-270m": "gemma3-270m-q4_k_m",
    "qwen2.5-coder-0.5b": "qwen2.5-coder-0.5b-instruct-q4_k_m",
    "qwen2.5-coder-1.5b": "qwen2.5-coder-1.5b-instruct-q4_k_m",
}
NEAR_TIE = 2e-4
"""A greedy choice may differ only where the reference's own margin is below this share of its largest logit."""
CLOSE = 1e-4
"""Logits agree to this share of the largest."""
BY_INT8 = {"smollm2-135m": 0.16, "gemma3-270m": 0.12, "qwen2.5-coder-0.5b": 0.1}
"""Mean difference of the native kernels, by rounding inputs to int8, keys and values to bfloat16. The embedding in the
place of the third one's own head, which is the same in another format, would make it 0.15."""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", MODELS)
def test_greedy_equals_transformers(name: str, test_model: Callable[[str], Path]) -> None:
    entries = golden(name)
    with LLM(test_model(name), context=4096, kv_format="f32", backend="torch") as llm:
        prompts = [e["prompt"] for e in entries]
        free = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
        for entry, output in zip(entries, free, strict=True):
            check_choices(entry, output.outputs[0].token_ids)
        forced = [e["prompt"] + e["generated"][:-1] for e in entries]
        for entry, output in zip(
            entries, llm.generate(forced, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5)), strict=True
        ):
            check_logits(entry, output)


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b"])
def test_w1_w2_w3_native_kernels_are_near_transformers(name: str, test_model: Callable[[str], Path]) -> None:
    """Teacher-forced: the same likeliest tokens at nearly all positions, the differences between their logits off by
    little. One format, norm, head or scale read wrongly gives other text altogether."""
    entries = sorted(golden(name), key=lambda entry: len(entry["prompt"]))[:4]
    with LLM(test_model(name), context=512, pool_bytes=1 << 26, weight_cache=False) as llm:
        forced = [e["prompt"] + e["generated"][:-1] for e in entries]
        outputs = llm.generate(forced, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5))
    same, shared, off = list[bool](), list[int](), list[float]()
    for entry, output in zip(entries, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for i, ours in enumerate(output.prompt_logprobs[len(entry["prompt"]) :]):
            ids, logits = entry["top_ids"][i], entry["top_logits"][i]
            assert ours is not None
            same.append(max(ours, key=lambda token: ours[token].logprob) == ids[0])
            shared.append(len(set(ids) & set(ours)))
            for token, logit in zip(ids[1:], logits[1:], strict=True):
                if token in ours and ids[0] in ours:
                    off.append(abs(ours[ids[0]].logprob - ours[token].logprob - (logits[0] - logit)))
    assert len(same) == 4 * 63
    assert np.mean(same) > 0.95
    assert np.mean(shared) > 4.7
    assert np.mean(off) < BY_INT8[name]


def golden(name: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads((GOLDEN / f"{MODELS[name]}.json").read_text(encoding="utf-8"))["entries"]
    assert len(entries) == 16
    return entries


def check_choices(entry: dict[str, Any], tokens: list[int]) -> None:
    """Equal, or different from a place on where the reference itself hardly preferred its choice."""
    assert len(tokens) == 64
    for i, (ours, theirs) in enumerate(zip(tokens, entry["generated"], strict=True)):
        if ours != theirs:
            first, second = entry["top_logits"][i][:2]
            assert ours == entry["top_ids"][i][1], f"{entry['name']}: token {i} is not even the second choice"
            assert first - second < NEAR_TIE * abs(first), f"{entry['name']}: token {i} differs at a clear margin"
            return


def check_logits(entry: dict[str, Any], output: RequestOutput) -> None:
    """Teacher-forced on the reference's tokens, differences between its five largest logits are the same."""
    assert output.prompt_logprobs is not None
    start = len(entry["prompt"])
    for i in range(63):
        ours = output.prompt_logprobs[start + i]
        assert ours is not None
        ids, logits = entry["top_ids"][i], entry["top_logits"][i]
        for token, logit in zip(ids[1:], logits[1:], strict=True):
            if token in ours and ids[0] in ours:
                gap = ours[ids[0]].logprob - ours[token].logprob
                assert gap == pytest.approx(logits[0] - logit, abs=2 * CLOSE * abs(logits[0])), (entry["name"], i)
        assert len(set(ids) & set(ours)) >= 4, f"{entry['name']}: position {i}: other likeliest tokens"
