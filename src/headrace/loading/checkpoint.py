"""A checkpoint, opened: everything about a model that comes from its files. Opening reads headers, not weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.models.spec import Spec
from headrace.tokenize.tokenizer import Tokenizer

from headrace.loading.source import Source


@dataclass(frozen=True)
class GenerationDefaults:
    """What the model's makers suggest (generation_config.json or GGUF's general.sampling.*); None: nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True)
class Checkpoint:
    """Facts of one model."""

    path: Path
    name: str
    """What the model is called where nobody said otherwise: the file's stem or the folder's name."""
    source: Source
    config: Mapping[str, Any]
    """In Hugging Face's words, also for GGUF."""
    spec: Spec
    tokenizer: Tokenizer
    generation: GenerationDefaults
    eos: frozenset[int]
    """Every token that ends an answer: the union of what tokenizer, config and generation config name."""
