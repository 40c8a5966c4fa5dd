"""Models that several files compare bits on; each is written and read once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.exact.checkpoints import MAKERS
from tests.models.running import Model


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The file or folder of a tiny model by its name in `MAKERS`."""
    return cache(lambda name: MAKERS[name](tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def tiny_model(tiny_path: Callable[[str], Path]) -> Callable[[str], Model]:
    return cache(lambda name: Model.open(tiny_path(name)))
