"""Mistral: Llama's shape, with one sliding window in every layer (`sliding_window` null: none)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.models.facts import ConfigFacts
from headrace.models.parts import uniform
from headrace.models.spec import Spec


def mistral(config: Mapping[str, Any]) -> Spec:
    facts = ConfigFacts(config)
    window = 4096 if "sliding_window" not in config else None
    if facts.has("sliding_window"):
        window = facts.integer("sliding_window")
    return uniform(facts, "mistral", (window,) * facts.integer("num_hidden_layers"))
