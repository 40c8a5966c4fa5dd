"""Cases P1, P4 and W8 on the real executor: what a preemption must not change, and number formats that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace import LLM, OptionError, SamplingParams
from tests.models.tiny import tiny_checkpoint

WAYS = {
    "P1": SamplingParams(temperature=0.8, seed=42, max_tokens=90, ignore_eos=True),
    "P4": SamplingParams(
        temperature=0,
        repetition_penalty=3.0,
        presence_penalty=2.0,
        frequency_penalty=2.0,
        max_tokens=90,
        ignore_eos=True,
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", num_hidden_layers=1)


@pytest.mark.parametrize("way", WAYS)
def test_a_preemption_changes_nothing(way: str, folder: Path) -> None:
    """Seeded draws, and counts of what was answered: the same alone and in a pool that is far too small."""
    prompts = [[(7 * i + j) % 60 + 3 for j in range(24 + i)] for i in range(6)]
    with LLM(folder, threads=1, pool_bytes=1 << 22) as roomy:
        block = roomy.model.plan.memory.pool.block_bytes
        alone = [roomy.generate(prompt, WAYS[way])[0].outputs[0].token_ids for prompt in prompts]
        plain = roomy.generate(prompts[0], SamplingParams(temperature=0, max_tokens=90, ignore_eos=True))[0]
    assert alone[0] != plain.outputs[0].token_ids, "the parameters must matter"
    with LLM(folder, threads=1, pool_bytes=6 * block, budget=33) as crowded:
        together = crowded.generate(prompts, WAYS[way])
        assert crowded.model.stats().preemptions > 0
        assert [output.outputs[0].token_ids for output in together] == alone


@pytest.mark.parametrize("kv_format", ["f16", "fp16", "float16"])
def test_w8_a_half_float_pool_is_refused(kv_format: str, folder: Path) -> None:
    with pytest.raises(OptionError, match=f"kv_format must be one of f32, bf16, int8, int4, not '{kv_format}'"):
        LLM(folder, kv_format=kv_format)
