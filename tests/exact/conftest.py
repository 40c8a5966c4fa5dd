"""Models that several files compare bits on; each is read once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.models.running import Model


@pytest.fixture(scope="session")
def tiny_model(tiny_path: Callable[[str], Path]) -> Callable[[str], Model]:
    return cache(lambda name: Model.open(tiny_path(name)))
