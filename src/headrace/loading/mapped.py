"""Opening files that may be broken or hostile: regular files only, mapped read-only, and a budget for what the reading
of their headers may cost. Knows no file format.

A mapped file that another process cuts short is a bus error for whoever reads on; nothing here can prevent that.
"""

from __future__ import annotations

import mmap
import os
import stat
from math import prod
from pathlib import Path

import numpy as np

from headrace.errors import ModelFileError

HEADER_BYTES = 48 << 20
"""Memory that headers may take, above the sizes of the files themselves."""

HEADER_WORK = 3_000_000
"""Work that headers may cause, in units of about 100 ns."""


def map_file(path: Path) -> mmap.mmap:
    """The whole file, mapped read-only. ModelFileError for whatever is not a readable regular file with something in
    it; never blocks, also not on a pipe without a writer."""
    try:
        _refuse_special(path, os.stat(path).st_mode)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            _refuse_special(path, found.st_mode)
            if not found.st_size:
                raise ModelFileError(path, "is empty (0 bytes)")
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        if path.is_symlink():
            raise ModelFileError(path, f"is a symbolic link to {os.readlink(path)}, which does not exist") from None
        raise ModelFileError(path, "does not exist") from None
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL byte, a file emptied meanwhile
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ModelFileError(path, f"cannot be read: {reason}") from None


def mapped_bytes(data: mmap.mmap, start: int, shape: tuple[int, ...]) -> np.ndarray:
    """uint8 [*shape], a read-only view of the file's bytes from `start` on. It keeps the mapping alive."""
    size = prod(shape)
    if not size:
        return np.empty(shape, np.uint8)
    return np.frombuffer(data, np.uint8, size, start).reshape(shape)


class Budget:
    """What reading the headers of one model may cost, so that no file, however made, takes much more memory than it
    has bytes, or much more than half a second. One for all files of a model."""

    def __init__(self) -> None:
        self._bytes = HEADER_BYTES
        self._work = HEADER_WORK

    def allow(self, size: int) -> None:
        """A file of `size` bytes was opened: as much memory may be taken on top, and 10 ms more."""
        self._bytes += size
        self._work += 100_000

    def spend(self, path: Path, what: str, *, memory: int, work: int) -> None:
        """Takes bytes and work off; ModelFileError, naming what was to be read, where they do not suffice."""
        self._bytes -= memory
        self._work -= work
        if self._bytes < 0:
            cost = f"over {HEADER_BYTES >> 20} MiB above the file's size"
        elif self._work < 0:
            cost = "over half a second to read"
        else:
            return
        raise ModelFileError(path, f"{what}: the header is too large, it would take {cost}")


def _refuse_special(path: Path, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    raise ModelFileError(path, f"is {kinds.get(stat.S_IFMT(mode), 'something special')}, not a file")
