"""Llama 2 and 3, and the many models of their shape (SmolLM2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.models.facts import ConfigFacts
from headrace.models.parts import uniform
from headrace.models.spec import Spec


def llama(config: Mapping[str, Any]) -> Spec:
    facts = ConfigFacts(config)
    return uniform(facts, "llama", (None,) * facts.integer("num_hidden_layers"))
