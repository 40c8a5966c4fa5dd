"""Which families there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace.models.facts import ConfigFacts
from headrace.models.gemma import gemma2, gemma3, gemma3_text
from headrace.models.llama import llama
from headrace.models.mistral import mistral
from headrace.models.phi3 import phi3
from headrace.models.qwen import qwen2, qwen3
from headrace.models.spec import Spec

FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], Spec]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
    "gemma3": gemma3,
    "phi3": phi3,
}
"""By the config's model_type."""


def family(config: Mapping[str, Any]) -> Spec:
    """The Spec of a config in Hugging Face's words. ValueError says which key is missing, wrong or not supported."""
    facts = ConfigFacts(config)
    kind = facts.text("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"model_type {kind!r} is not supported: known are {', '.join(FAMILIES)}")
    if quantization := facts.mapping("quantization_config"):
        method = quantization.get("quant_method", "unnamed")
        raise ValueError(
            f"quantization_config ({method}): quantized safetensors are not supported; take the float ones or a GGUF"
        )
    return FAMILIES[kind](config)
