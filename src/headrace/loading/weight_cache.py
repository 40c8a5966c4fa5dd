"""Packed weights on disk, so that a second start does not pack them again. Owns the folder: one entry for each model
and way to pack, how an entry is found, kept, made room for and cleared. How an entry is laid out: weight_file.py.

An entry is used where the model's files are the same by device, inode, size and times, and by bytes sampled from them.
Beside it lies a note of the states in which the entry and the model's files were last digested whole; where one of
them was touched since, it is digested again before the entry is used. The note's time is that of the last use.

Nothing here is ever an error for the user: what cannot be used is packed anew, what cannot be kept is logged.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.loading import weight_file
from headrace.loading.checkpoint import Checkpoint
from headrace.paths import cache_home
from headrace.program.backend import PackedLayout

log = logging.getLogger(__name__)

ENTRY, NOTE, PART = ".weights", ".json", ".part"
_FREE_SHARE = 2
"""All entries together take at most one part in so many of the disk's free bytes, their own counted as free."""


def weights_folder() -> Path:
    return cache_home() / "weights"


@dataclass(frozen=True, slots=True)
class Entry:
    """One model's packed weights on disk."""

    name: str
    """Of the model; where the entry has no whole note, what its file is called after."""
    source: str
    """Path of the model; "" where the entry has no whole note."""
    path: Path
    nbytes: int
    last_used: float
    """Seconds since 1970."""


class WeightCache:
    """The packed weights of one checkpoint: a `PackedStore`."""

    def __init__(self, checkpoint: Checkpoint, *, most_bytes: int, threads: int, folder: Path | None = None) -> None:
        self._checkpoint = checkpoint
        self._files = dict(checkpoint.source.files)
        self._most_bytes = most_bytes
        self._threads = threads
        self._folder = folder or weights_folder()
        self._writer: threading.Thread | None = None

    def get(self, layout: PackedLayout) -> np.ndarray | None:
        """The packed weights; None where they must be packed anew."""
        try:
            with _opened(self._path(layout), os.O_RDONLY) as entry:
                header = weight_file.read_header(entry)
                if header is None or header.nbytes != layout.nbytes or header.about != self._about(layout):
                    return None
                if not self._trusted(layout, entry, header):
                    return None
                packed = weight_file.read(entry, header, self._threads)
        except (OSError, ValueError, KeyError, MemoryError, RuntimeError) as error:  # RuntimeError: no thread to be had
            if not isinstance(error, FileNotFoundError):
                log.warning("packed weights of %s are not used: %s", self._checkpoint.name, error)
            return None
        with suppress(OSError):
            os.utime(self._path(layout, NOTE))
        return packed

    def put(self, layout: PackedLayout, packed: np.ndarray) -> None:
        """Write them in a thread. At its end the program waits for it, unless it is interrupted."""
        writer = threading.Thread(target=self._write, args=(layout, packed), name="headrace-weight-cache", daemon=True)
        atexit.register(self._finish)
        try:
            writer.start()
        except RuntimeError as error:  # the system has no thread to give
            atexit.unregister(self._finish)
            log.warning("packed weights of %s are not kept: %s", self._checkpoint.name, error)
            return
        self._writer = writer

    def wait(self) -> None:
        """Until what was put is on disk, or never will be."""
        if self._writer is not None:
            self._writer.join()

    def _finish(self) -> None:
        with suppress(KeyboardInterrupt):  # what is half written the next writer takes over
            self.wait()

    # -- which entry, and whether it is the right one ------------------------------------------------------------------

    def _path(self, layout: PackedLayout, suffix: str = ENTRY) -> Path:
        """One for each place of a model and way to pack: a file that was replaced replaces its entry."""
        first = os.path.realpath(next(iter(self._files)))
        key = hashlib.sha256(f"{layout.version}\0{first}".encode(errors="surrogateescape")).hexdigest()[:12]
        name = "".join(c if c.isalnum() or c in "-_." else "_" for c in self._checkpoint.name)[:64]
        return self._folder / f"{name}-{key}{suffix}"

    def _about(self, layout: PackedLayout) -> dict[str, Any]:
        """Everything that the packed bytes depend on, and where each weight lies among them."""
        files = []
        for path, known in self._files.items():
            with _opened(path, os.O_RDONLY) as file:
                if weight_file.state(file) != known:
                    raise ValueError(f"{path} was changed meanwhile")
                sample = weight_file.sampled(file, known.size)
            files.append([known.device, known.inode, known.size, known.mtime_ns, sample])
        parts = [[p.name, self._origin(p.name), p.format, list(p.shape), p.start, p.nbytes] for p in layout.parts]
        return {"layout": layout.version, "files": files, "parts": parts}

    def _origin(self, name: str) -> list[Any]:
        """Which tensor of the file a weight is, and which of its lines."""
        part = self._checkpoint.parts[name]
        if part.rows is None or isinstance(part.rows, slice):
            return [part.tensor, str(part.rows)]
        return [part.tensor, hashlib.sha256(np.ascontiguousarray(part.rows, "<i8").tobytes()).hexdigest()]

    def _trusted(self, layout: PackedLayout, entry: int, header: weight_file.Header) -> bool:
        """Whether entry and files are those that were digested; digests them where they were touched since."""
        told, now = _read_note(self._path(layout, NOTE)), self._note(layout, entry)
        if told == now:
            return True
        log.info("%s or its packed weights were touched: they are digested anew", self._checkpoint.name)
        if told.get("sources") != now["sources"] and weight_file.digest_of(list(self._files)) != header.source_digest:
            return False
        if told.get("entry") != now["entry"] and weight_file.packed_digest(entry, header) != header.packed_digest:
            return False
        _write_note(self._path(layout, NOTE), now)
        return True

    def _note(self, layout: PackedLayout, entry: int) -> dict[str, Any]:
        return {
            "model": self._checkpoint.name,
            "path": str(self._checkpoint.path.absolute()),
            "entry": asdict(weight_file.state(entry)),
            "sources": [asdict(known) for known in self._files.values()],
        }

    # -- writing -------------------------------------------------------------------------------------------------------

    def _write(self, layout: PackedLayout, packed: np.ndarray) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # answers come first
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _alone(self._path(layout, PART)) as part:
                if part is None:
                    log.info("another process keeps the packed weights of %s", self._checkpoint.name)
                elif not self._is_kept(layout) and self._make_room(layout):
                    self._keep(layout, packed, part)
        except (OSError, ValueError) as error:
            log.warning("packed weights of %s are not kept in %s: %s", self._checkpoint.name, self._folder, error)
        finally:
            atexit.unregister(self._finish)

    def _is_kept(self, layout: PackedLayout) -> bool:
        """Whether another process has kept them since we looked."""
        with suppress(OSError), _opened(self._path(layout), os.O_RDONLY) as entry:
            header = weight_file.read_header(entry)
            told = _read_note(self._path(layout, NOTE))
            return header is not None and header.about == self._about(layout) and told == self._note(layout, entry)
        return False

    def _make_room(self, layout: PackedLayout) -> bool:
        """Removes entries, the one in our place and then those used longest ago, until there is room for a new one."""
        _remove(self._path(layout))
        kept = entries(self._folder)
        taken = sum(entry.nbytes for entry in kept)
        most = min(self._most_bytes, (shutil.disk_usage(self._folder).free + taken) // _FREE_SHARE)
        if layout.nbytes > most:
            log.warning(
                "packed weights of %s (%d MB) are not kept: the weight cache may take %d MB of this disk "
                "(weight_cache_bytes, and at most half of what is free)",
                *(self._checkpoint.name, layout.nbytes // 10**6, most // 10**6),
            )
            return False
        for entry in sorted(kept, key=lambda entry: entry.last_used):
            if taken + layout.nbytes <= most:
                break
            _remove(entry.path)
            taken -= entry.nbytes
        return True

    def _keep(self, layout: PackedLayout, packed: np.ndarray, part: int) -> None:
        os.ftruncate(part, 0)
        weight_file.write(part, self._about(layout), packed, list(self._files))
        self._about(layout)  # the files were not changed while they were packed and digested
        self._path(layout, PART).rename(self._path(layout))
        _write_note(self._path(layout, NOTE), self._note(layout, part))  # after the renaming, which is a change
        with _opened(self._folder, os.O_RDONLY) as folder:
            os.fsync(folder)


def entries(folder: Path | None = None) -> list[Entry]:
    """All entries, by name; empty where there is no folder."""
    found = []
    for path in sorted((folder or weights_folder()).glob(f"*{ENTRY}")):
        with suppress(OSError):
            note, size = path.with_suffix(NOTE), path.stat().st_size
            used = (note if note.exists() else path).stat().st_mtime
            match _read_note(note):
                case {"model": str(name), "path": str(source)} if name:
                    found.append(Entry(name, source, path, size, used))
                case _:
                    found.append(Entry(path.stem.rpartition("-")[0], "", path, size, used))
    return found


def clear(name: str | None = None, folder: Path | None = None) -> list[Entry]:
    """Removes the entries of a model, or all of them and what interrupted writers left; those removed. A process that
    uses one goes on using it. OSError where one cannot be removed; the others are all the same."""
    place = folder or weights_folder()
    removed = [entry for entry in entries(place) if name is None or entry.name == name]
    failed: OSError | None = None
    for path in (path for entry in removed for path in (entry.path.with_suffix(NOTE), entry.path)):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            failed = error
    if name is None:
        for part in place.glob(f"*{PART}"):
            with suppress(OSError), _alone(part):
                pass
    if failed is not None:
        raise failed
    return removed


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.with_suffix(NOTE).unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def _read_note(path: Path) -> Mapping[str, Any]:
    """Empty where there is none, or not a whole one."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def _write_note(path: Path, told: Mapping[str, Any]) -> None:
    """Where it cannot be written, the next start digests again."""
    part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_native_id()}")
    try:
        part.write_text(json.dumps(told), encoding="utf-8")
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """A descriptor; opening never waits, also not for a pipe."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _alone(path: Path) -> Iterator[int | None]:
    """The file, opened for writing and locked; None where another process has it. What a writer that died left is
    taken over. OSError, also on a filesystem without locks: two writers could not be told apart."""
    with _opened(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        if not _is_at(descriptor, path):  # another writer has renamed it since we opened it
            yield None
            return
        try:
            yield descriptor
        finally:
            if _is_at(descriptor, path):
                path.unlink(missing_ok=True)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
