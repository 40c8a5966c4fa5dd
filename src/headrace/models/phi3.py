"""Phi-3 and Phi-4: Llama's shape with partial rotation and LongRoPE; its files store q, k, v and gate, up fused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.models.facts import ConfigFacts
from headrace.models.parts import uniform
from headrace.models.spec import Spec


def phi3(config: Mapping[str, Any]) -> Spec:
    """original_max_position_embeddings defaults to 4096; the rope types "su" and "yarn" of old files mean longrope."""
    config = {"original_max_position_embeddings": 4096, **config}
    for key in ("rope_scaling", "rope_parameters"):
        given = ConfigFacts(config).mapping(key) or {}
        if given.get("rope_type", given.get("type")) in ("su", "yarn"):
            config[key] = {**given, "rope_type": "longrope"}
    facts = ConfigFacts(config)
    window = facts.integer("sliding_window") if facts.has("sliding_window") else None
    return uniform(facts, "phi3", (window,) * facts.integer("num_hidden_layers"))
