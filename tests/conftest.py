"""Fixtures that several groups of tests need: where the real models are, and a cache that is not the user's."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import ml_dtypes  # noqa: F401  gives NumPy the name "bfloat16", by which safetensors' own reader asks for it
import pytest

from headrace.paths import cache_home

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

MODELS = Path(os.environ.get("HEADRACE_TEST_MODELS", "~/.cache/headrace-test-models")).expanduser()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of this run, for its subprocesses too: what tests load neither fills the user's cache nor pushes anything out of
    it. Only the catalogue's models are the user's, so that they are downloaded once."""
    models = cache_home() / "models"
    models.mkdir(parents=True, exist_ok=True)
    folder = tmp_path_factory.mktemp("cache")
    (folder / "models").symlink_to(models)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_CACHE", str(folder))
        yield
    for thread in threading.enumerate():
        if thread.name == "headrace-weight-cache":
            thread.join()
    shutil.rmtree(folder / "weights", ignore_errors=True)  # hundreds of megabytes


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2's GGUF file, through the product's own catalogue."""
    from headrace.loading.resolve import resolve

    return resolve("smollm2-135m")


@pytest.fixture(scope="session")
def test_model(smollm2: Path) -> Callable[[str], Path]:
    """A real model by its short name; the test is skipped where HEADRACE_TEST_MODELS does not have it."""
    files = {
        "gemma3-270m": MODELS / "gemma3-270m-q4_k_m.gguf",
        "qwen2.5-coder-0.5b": MODELS / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "qwen2.5-coder-1.5b": MODELS / "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    }

    def find(name: str) -> Path:
        if name == "smollm2-135m":
            return smollm2
        if not files[name].exists():
            pytest.skip(f"{files[name].name} is not in {MODELS} (set HEADRACE_TEST_MODELS to the folder that has it)")
        return files[name]

    return find


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The file or folder of a tiny random model by its name in `tests.exact.checkpoints`; each is written once."""
    from tests.exact.checkpoints import MAKERS

    return cache(lambda name: MAKERS[name](tmp_path_factory.mktemp(name)))
