"""Opening files that may be broken or hostile: regular files only, mapped read-only, and a budget for what the reading
of their headers may cost. Knows no file format.

A mapped file that another process cuts short is a bus error for whoever reads on; nothing here can prevent that.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from headrace.errors import ModelFileError

HUGE = 2 << 20
"""Bytes of a huge page on x86-64, and on Arm where the others have 4 KiB."""

HEADER_BYTES = 48 << 20
"""Memory that headers may take, above the sizes of the files themselves."""

HEADER_WORK = 3_000_000
"""Work that headers may cause, in units of about 100 ns."""

_POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14; the mmap module has no name for it."""


@dataclass(frozen=True, slots=True)
class FileState:
    """Which file it is and when it was last changed, as the system tells."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    """Of the last change of any kind. Unlike `mtime_ns` no program can set it back."""

    @classmethod
    def of(cls, found: os.stat_result) -> FileState:
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def map_file(path: Path) -> mmap.mmap:
    """The whole file, mapped read-only. ModelFileError for whatever is not a readable regular file with something in
    it; never blocks, also not on a pipe without a writer."""
    return map_known(path)[0]


def map_known(path: Path) -> tuple[mmap.mmap, FileState]:
    """`map_file`, and the state of the very file that is mapped."""
    try:
        _refuse_special(path, os.stat(path).st_mode)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            _refuse_special(path, found.st_mode)
            if not found.st_size:
                raise ModelFileError(path, "is empty (0 bytes)")
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), FileState.of(found)
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


def forget(maps: Iterable[mmap.mmap]) -> None:
    """Gives the memory of mapped pages back to the system; what is touched again is read again."""
    for data in maps:
        data.madvise(mmap.MADV_DONTNEED)


def map_shared(descriptor: int, nbytes: int) -> np.ndarray:
    """uint8 [nbytes], read-only: the first bytes of a file of our own, all read in, on huge pages if the system likes.
    Every process that maps it shares them. OSError where it cannot be mapped."""
    data = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    for advice in (mmap.MADV_HUGEPAGE, _POPULATE_READ):
        with suppress(OSError):  # a kernel that knows neither maps the file all the same
            data.madvise(advice)
    return np.frombuffer(data, np.uint8)


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
