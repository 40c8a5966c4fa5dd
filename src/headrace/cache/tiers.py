"""Where blocks go when the pool has no room for them, and from where they come back: the seam, and its member on disk.

A tier keeps the bytes of cached blocks by the key of their prefix (`cache.radix`), which stands for everything that the
bytes depend on. It may lose anything at any time, so it never promises; what it gives back is what was put.
"""

from __future__ import annotations

import logging
import os
import re
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

from headrace.cache.pool import Bytes

_log = logging.getLogger(__name__)

_LEFT_S = 600
"""Seconds after which nobody is still writing a file."""


class Tier(Protocol):
    """Blocks by key. May be called from any thread."""

    def groups(self, key: bytes) -> int:
        """The KV groups whose blocks are there under this key, as bits; 0 where there is nothing."""

    def put(self, key: bytes, groups: int, parts: Sequence[Bytes]) -> bool:
        """Keep the blocks of one entry, those of the groups in `groups` in order. False: it could not be kept."""

    def get(self, key: bytes) -> bytes | None:
        """What was put, one after the other; None where it is gone or not whole."""


class DiskTier:
    """A folder with one file for each entry, at most `most_bytes` in all; the least recently used ones go first.

    Files are written under another name and renamed, and carry a digest. Several processes may share the folder. What
    is not ours is never touched; what is ours and broken is removed. Both are said once.
    """

    _MAGIC = b"HEADRACE KV 1\n\0\0"
    _HEAD = struct.Struct("<16s32sQ32s")
    _NAME = re.compile(r"([0-9a-f]{64})-([0-9a-f]{1,8})\.kv")
    _PART = re.compile(r"[0-9a-f]{64}\.[0-9]+-[0-9]+\.part")

    def __init__(self, folder: Path, most_bytes: int) -> None:
        """OSError where the folder cannot be made or read."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._most = most_bytes
        self._lock = threading.Lock()
        self._files: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._bytes = 0
        self._warned: set[str] = set()
        found = []
        for file in os.scandir(folder):
            name, part = self._NAME.fullmatch(file.name), self._PART.fullmatch(file.name)
            if name is None and part is None:
                self._warn("foreign", f"{file.path} is no block of a KV cache; such files are left alone")
                continue
            try:
                about = file.stat()
                if part and time.time() - about.st_mtime > _LEFT_S:
                    os.unlink(file.path)
            except FileNotFoundError:  # another process was faster
                continue
            if name is None:
                continue
            found.append((about.st_mtime_ns, bytes.fromhex(name[1]), int(name[2], 16), about.st_size))
        for _, key, groups, size in sorted(found):
            self._note(key, groups, size)
        self._make_room(0)

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._files)

    def groups(self, key: bytes) -> int:
        with self._lock:
            known = self._files.get(key)
        return known[0] if known else 0

    def put(self, key: bytes, groups: int, parts: Sequence[Bytes]) -> bool:
        size = self._HEAD.size + sum(len(part) for part in parts)
        if size > self._most:
            return False
        self._make_room(size)
        part = self._folder / f"{key.hex()}.{os.getpid()}-{threading.get_ident()}.part"
        try:
            with open(part, "wb") as file:
                digest = blake2b(digest_size=32)
                for piece in parts:
                    digest.update(piece)
                file.write(self._HEAD.pack(self._MAGIC, key, size - self._HEAD.size, digest.digest()))
                for piece in parts:
                    file.write(piece)
            part.rename(self._path(key, groups))
        except OSError as error:
            self._warn("write", f"blocks cannot be kept in {self._folder}: {error.strerror}")
            part.unlink(missing_ok=True)
            return False
        with self._lock:
            self._forget(key, but=groups)
            self._note(key, groups, size)
        return True

    def get(self, key: bytes) -> bytes | None:
        with self._lock:
            known = self._files.get(key)
            if known is None:
                return None
            self._files.move_to_end(key)
        path, head, content = self._path(key, known[0]), None, b""
        try:
            with open(path, "rb") as file:
                head = file.read(self._HEAD.size)
                content = file.read()
            os.utime(path)
        except FileNotFoundError:  # another process made room
            pass
        except OSError as error:
            self._warn("read", f"{path} cannot be read: {error.strerror}")
        if head is not None and self._right(key, head, content):
            return content
        with self._lock:
            self._forget(key)
        if head is not None:
            self._warn("torn", f"{path} is not whole; such files are removed")
            path.unlink(missing_ok=True)
        return None

    def _right(self, key: bytes, head: bytes, content: bytes) -> bool:
        if len(head) != self._HEAD.size:
            return False
        magic, name, size, digest = self._HEAD.unpack(head)
        same = (magic, name, size) == (self._MAGIC, key, len(content))
        return same and blake2b(content, digest_size=32).digest() == digest

    def _path(self, key: bytes, groups: int) -> Path:
        return self._folder / f"{key.hex()}-{groups:x}.kv"

    def _note(self, key: bytes, groups: int, size: int) -> None:
        self._forget(key, but=groups)
        self._files[key] = groups, size
        self._bytes += size

    def _forget(self, key: bytes, but: int = 0) -> None:
        """Out of the index; its file too where it is under another name than that of the groups `but`."""
        if known := self._files.pop(key, None):
            self._bytes -= known[1]
            if but and known[0] != but:
                self._path(key, known[0]).unlink(missing_ok=True)

    def _make_room(self, size: int) -> None:
        while True:
            with self._lock:
                if not self._files or self._bytes + size <= self._most:
                    return
                key, (groups, _) = next(iter(self._files.items()))
                self._forget(key)
            self._path(key, groups).unlink(missing_ok=True)

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning("%s", text)
