"""The real tokenizers, and transformers' own of SmolLM2: loaded once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.loading.gguf import GGUF
from headrace.tokenize.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where these tests keep what is derived from tokenizers."""
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="session")
def real(test_model: Callable[[str], Path], kept: Path) -> Callable[[str], Tokenizer]:
    """The tokenizer of a real model by its short name; the test is skipped where its file is not there."""
    loaded: dict[str, Tokenizer] = {}

    def load(name: str) -> Tokenizer:
        if name not in loaded:
            file = test_model(name)
            loaded[name] = Tokenizer.from_gguf(GGUF(file).metadata, cache_dir=kept, path=file)
        return loaded[name]

    return load


@pytest.fixture(scope="session")
def transformers_smollm2(smollm2: Path) -> Any:
    """What transformers makes of SmolLM2's file, as it comes."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
