"""Qwen2, Qwen2.5 (biases on queries, keys and values) and Qwen3 (norms on queries and keys)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.models.facts import ConfigFacts
from headrace.models.parts import uniform, windowed
from headrace.models.spec import Spec


def qwen2(config: Mapping[str, Any]) -> Spec:
    facts = ConfigFacts(config)
    return uniform(facts, "qwen2", windowed(facts))


def qwen3(config: Mapping[str, Any]) -> Spec:
    facts = ConfigFacts({"head_dim": 128, **config})
    return uniform(facts, "qwen3", windowed(facts))
