"""Files that are there whole or not at all: a lock between processes, digests, and the marker of a verified file.

Knows no source and no format.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

CHUNK = 1 << 20
"""Bytes read at once."""

_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}


@contextmanager
def locked(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[int]:
    """Hold the lock file `path` alone among all processes; yields its descriptor.

    A child that inherits the descriptor holds the lock too; the system frees it when the last holder is gone, killed
    or not. `waiting` is called once where another process holds it. On a filesystem without locks nobody waits: what
    is written under the lock must then be caught by its digest.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)
        try:
            _lock(descriptor, waiting)
            if _is_at(descriptor, path):
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _lock(descriptor: int, waiting: Callable[[], None] | None) -> None:
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting:
                waiting()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as e:
        if e.errno not in _NO_LOCKS:
            raise


def _is_at(descriptor: int, path: Path) -> bool:
    """False where another process removed the lock file before we got its lock."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    mine = os.fstat(descriptor)
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)


def sha256(path: Path, tick: Callable[[int], None] | None = None) -> str:
    """Hex digest of a file; `tick` is told the bytes read so far."""
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            done += len(chunk)
            if tick:
                tick(done)
    return digest.hexdigest()


def is_verified(path: Path, digest: str) -> bool:
    """Whether `path` was once found to have this SHA-256 and has kept its size and modification time since."""
    try:
        told = json.loads(_marker(path).read_text())
        found = path.stat()
    except (OSError, ValueError):
        return False
    return bool(told == {"sha256": digest, "size": found.st_size, "mtime_ns": found.st_mtime_ns})


def mark_verified(path: Path, digest: str) -> None:
    """Remember that `path` has this SHA-256. Where the marker cannot be written, the file is hashed again next time."""
    found = path.stat()
    told = {"sha256": digest, "size": found.st_size, "mtime_ns": found.st_mtime_ns}
    marker = _marker(path)
    part = marker.with_name(f"{marker.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps(told))
        part.replace(marker)
    except OSError:
        part.unlink(missing_ok=True)


def _marker(path: Path) -> Path:
    return path.with_name(path.name + ".verified")
