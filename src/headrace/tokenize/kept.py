"""What was derived from a tokenizer's files, kept on disk for the next start. Owns how such a file is laid out.

A file is its magic, the SHA-256 of the rest, and little-endian int32 pairs. One that is torn or was changed is made
anew; a folder that cannot be written to is no error, the pairs are then made at every start.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

_MAGIC = b"headrace pairs 1\n"
_DIGEST = hashlib.sha256().digest_size


def kept_pairs(folder: Path, key: str, make: Callable[[], np.ndarray]) -> np.ndarray:
    """int32 [n, 2]: what `make` returned when it was first asked under this key. The key must change with whatever
    the pairs depend on, the way they are made included; it becomes the name of the file."""
    file = folder / f"{key}.pairs"
    pairs = _read(file)
    if pairs is None:
        pairs = make()
        _write(file, pairs)
    return pairs


def _read(file: Path) -> np.ndarray | None:
    """None where there is no such file, or not a whole one."""
    try:
        data = file.read_bytes()
    except (OSError, ValueError):
        return None
    start = len(_MAGIC) + _DIGEST
    body = memoryview(data)[start:]
    if not data.startswith(_MAGIC) or data[len(_MAGIC) : start] != hashlib.sha256(body).digest() or len(body) % 8:
        return None
    return np.frombuffer(body, "<i4").reshape(-1, 2)


def _write(file: Path, pairs: np.ndarray) -> None:
    """Whole or not at all: written beside the place and moved there."""
    body = np.ascontiguousarray(pairs, "<i4").tobytes()
    part = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name[:32]}.")
        with os.fdopen(descriptor, "wb") as out:
            out.write(_MAGIC + hashlib.sha256(body).digest() + body)
        os.replace(part, file)
    except (OSError, ValueError):
        if part is not None:
            with contextlib.suppress(OSError):
                os.unlink(part)
