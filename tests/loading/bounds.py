"""The bounds that hold for any model file that is refused, however hostile."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import ModelFileError

SECONDS = 1.0
BYTES = 64 << 20
"""Above the size of what is opened."""


def refused(opens: Callable[[Path], object], path: Path, match: str | None, *, size: int) -> str:
    """`opens(path)` is refused with one error, in time and memory; `size` is that of the files. The error's message."""
    start = time.process_time()
    with pytest.raises(ModelFileError, match=match):
        opens(path)
    assert time.process_time() - start < SECONDS
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError) as caught:
            opens(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < BYTES + size
    assert caught.value.__context__ is None or caught.value.__suppress_context__, "one error, not a chain of them"
    return str(caught.value)
