"""One file of packed weights: how it is laid out, written whole or not at all, and read back. Knows no folder.

    magic, length of the header (8 bytes, little endian), SHA-256 of the header, the header: a JSON object, zeros
    from a boundary of 2 MiB on: the packed weights, filled up with zeros to whole 4 KiB
    SHA-256 of the header again, and the word that says that everything before it was written

The header holds `about`, which must be equal word for word for the weights to be the right ones, and the digests of
the packed bytes and of the files they were made from. It is written last.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace import native
from headrace.hardware import grants_huge_memory, resident
from headrace.loading.mapped import HUGE, FileState, map_shared

SLICE = 8 << 20
"""Bytes read or written at once. Writes of whole huge pages on their boundaries are what makes the system keep the file
in huge pages; smaller ones do not."""

SAMPLE = 16 << 10
SAMPLES = 16

_MAGIC = b"headrace weights 1\n\0\0\0\0\0"
_START = len(_MAGIC) + 8 + 32
_COMPLETE = b"complete"
_MOST_HEADER = 64 << 20
_ALIGN = 4096
_HUGE_ENOUGH = 0.75
"""Share of a mapped file on huge pages from which on it is used as it is."""


@dataclass(frozen=True, slots=True)
class Header:
    """What an entry says of itself."""

    about: Mapping[str, Any]
    start: int
    """Where the packed weights begin."""
    nbytes: int
    packed_digest: str
    source_digest: str

    @property
    def size(self) -> int:
        """Of the whole file."""
        return self.start + -(-self.nbytes // _ALIGN) * _ALIGN + 32 + len(_COMPLETE)


def sampled(descriptor: int, size: int) -> str:
    """Digest of the file's beginning, its end, and places between."""
    digest = hashlib.sha256()
    for number in range(SAMPLES):
        digest.update(os.pread(descriptor, SAMPLE, max(0, size - SAMPLE) * number // (SAMPLES - 1)))
    return digest.hexdigest()


def digest_of(paths: Sequence[Path]) -> str:
    """Digest of whole files, one after the other. OSError."""
    digest, piece = hashlib.sha256(), bytearray(1 << 20)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            digest.update(os.fstat(file.fileno()).st_size.to_bytes(8, "little"))
            while count := file.readinto(piece):
                digest.update(memoryview(piece)[:count])
    return digest.hexdigest()


def packed_digest(descriptor: int, header: Header) -> str:
    """Digest of the packed weights as they lie in the file. OSError."""
    digest, piece = hashlib.sha256(), bytearray(1 << 20)
    at, end = header.start, header.start + header.nbytes
    while at < end and (count := os.preadv(descriptor, [memoryview(piece)[: end - at]], at)):
        digest.update(memoryview(piece)[:count])
        at += count
    return digest.hexdigest()


def write(descriptor: int, about: Mapping[str, Any], packed: np.ndarray, sources: Sequence[Path]) -> Header:
    """Everything but the name: the file is empty before and on disk afterwards. OSError, as on a full disk."""
    draft = Header(about, 0, packed.nbytes, "0" * 64, "0" * 64)
    room = _START + len(_json(draft)) + 64  # the numbers in it are not known yet
    start = -(-room // HUGE) * HUGE
    data, digest = packed.data, hashlib.sha256()
    for at in range(0, len(data), SLICE):
        _write_all(descriptor, data[at : at + SLICE], start + at)
        digest.update(data[at : at + SLICE])
    header = Header(about, start, len(data), digest.hexdigest(), digest_of(sources))
    text = _json(header)
    checksum = hashlib.sha256(text).digest()
    os.ftruncate(descriptor, header.size)
    _write_all(descriptor, checksum + _COMPLETE, header.size - 32 - len(_COMPLETE))
    os.fsync(descriptor)
    _write_all(descriptor, _MAGIC + len(text).to_bytes(8, "little") + checksum + text, 0)
    os.fsync(descriptor)
    return header


def read_header(descriptor: int) -> Header | None:
    """None for anything that is not a whole entry. OSError."""
    size = os.fstat(descriptor).st_size
    head = os.pread(descriptor, _START, 0)
    length = int.from_bytes(head[len(_MAGIC) : len(_MAGIC) + 8], "little")
    if len(head) < _START or not head.startswith(_MAGIC) or length > min(_MOST_HEADER, size):
        return None
    text, checksum = os.pread(descriptor, length, _START), head[-32:]
    if hashlib.sha256(text).digest() != checksum:
        return None
    told = json.loads(text)  # what was written by `write`: the checksum says so
    header = Header(told["about"], told["start"], told["nbytes"], told["packed"], told["sources"])
    end = checksum + _COMPLETE
    if size != header.size or os.pread(descriptor, len(end), size - len(end)) != end:
        return None
    return header


def read(descriptor: int, header: Header, threads: int) -> np.ndarray:
    """uint8 [nbytes], read-only. The file itself where the system maps it in huge pages: that costs nothing, and every
    process shares it. Else a copy in memory of our own, which can have them. OSError, MemoryError.
    """
    before = resident()
    whole = map_shared(descriptor, header.start + header.nbytes)
    after = resident()
    huge = after.huge_file - before.huge_file if before is not None and after is not None else 0
    if huge >= _HUGE_ENOUGH * header.nbytes or header.nbytes < HUGE or not grants_huge_memory():
        return whole[header.start :]
    del whole
    return _copied(descriptor, header, threads)


def _copied(descriptor: int, header: Header, threads: int) -> np.ndarray:
    packed = native.reserve(header.nbytes)
    memory = packed.data

    def copy(at: int) -> None:
        end = min(at + SLICE, header.nbytes)
        while at < end:
            count = os.preadv(descriptor, [memory[at:end]], header.start + at)
            if not count:
                raise OSError(f"the file ends at byte {header.start + at:,}")
            at += count

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(copy, range(0, header.nbytes, SLICE)))
    packed.flags.writeable = False
    return packed


def state(descriptor: int) -> FileState:
    return FileState.of(os.fstat(descriptor))


def _json(header: Header) -> bytes:
    told = {
        "about": header.about,
        "start": header.start,
        "nbytes": header.nbytes,
        "packed": header.packed_digest,
        "sources": header.source_digest,
    }
    return json.dumps(told, sort_keys=True).encode()


def _write_all(descriptor: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, at)
        view, at = view[count:], at + count
