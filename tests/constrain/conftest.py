"""SmolLM2's tokenizer, read once."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.loading.checkpoint import open_checkpoint
from headrace.tokenize.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_checkpoint(smollm2, cache_dir=tmp_path_factory.mktemp("tokenizers")).tokenizer
