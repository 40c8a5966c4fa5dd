"""The header of one GGUF file: magic, metadata, tensor infos, every length and place checked before it is used.

Knows bytes and GGUF's grammar; not what the metadata mean for a model, nor that a model may be split over files.
Source: the GGUF specification (docs/gguf.md of GGML), versions 2 and 3, little endian.

    magic "GGUF", version u32, tensors u64, metadata u64
    metadata:  key string, type u32, value
    tensors:   name string, dimensions u32, u64 each (innermost first), type u32, offset u64
    padding to general.alignment, then the tensors at their offsets, each padded so, and nothing else
    string:    length u64, then as many bytes of UTF-8
    array:     element type u32, count u64, then the elements
"""

from __future__ import annotations

import codecs
import mmap
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, overload

import numpy as np

from headrace.errors import ModelFileError
from headrace.formats import FORMATS
from headrace.loading.mapped import Budget
from headrace.loading.source import PlacedTensor, TensorInfo

SMALL = 1024
"""Arrays of up to so many elements become lists; longer ones NumPy views of the file, or a `StringArray`."""

DEPTH = 4
"""Most arrays within arrays."""

NAME_BYTES = 65535
"""Longest key, and longest tensor name."""

TENSOR_TYPES = (
    *("F32", "F16", "Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1", "Q8_0", "Q8_1"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S"),
    *("IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32", "I64", "F64", "IQ1_M"),
    *("BF16", "Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8", "TQ1_0", "TQ2_0", "IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8", "MXFP4"),
    *("NVFP4", "Q1_0"),
)
"""GGML's tensor types by their number, also those that nobody writes any more."""

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9
_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
"""Metadata types of fixed size."""

_CHUNK = 1 << 20


class StringArray(Sequence[str]):
    """A long array of strings. Each is made when it is asked for; the bounds and UTF-8 of all were checked before."""

    def __init__(self, text: memoryview, starts: np.ndarray) -> None:
        """`text` is the array's part of the file; `starts`, int64 [strings + 1], are the places of each string's
        length in it, and its end."""
        self._text = text
        self._starts = starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]
        return str(self._text[self._starts[i] + 8 : self._starts[i + 1]], "utf-8")

    def __iter__(self) -> Iterator[str]:
        text = bytes(self._text)
        for start, end in pairwise(self._starts.tolist()):
            yield text[start + 8 : end].decode()

    def __repr__(self) -> str:
        return f"<{len(self):,} strings>"


@dataclass(frozen=True, slots=True)
class Header:
    """All that one file says before its tensors' bytes."""

    metadata: dict[str, Any]
    tensors: list[PlacedTensor]


def read_header(path: Path, data: mmap.mmap, budget: Budget) -> Header:
    """Reads and checks it all; ModelFileError, naming the part at fault, where anything is not as it must be."""
    cursor = _Cursor(path, data, budget)
    tensors, pairs = _preamble(cursor)
    metadata, alignment = _metadata(cursor, pairs)
    return Header(metadata, _tensors(cursor, tensors, alignment))


class _Cursor:
    """A place in the file that only moves over bytes which are there."""

    def __init__(self, path: Path, data: mmap.mmap, budget: Budget) -> None:
        self.path = path
        self.data = memoryview(data)
        self.size = len(data)
        self.at = 0
        self._budget = budget

    def error(self, message: str) -> ModelFileError:
        return ModelFileError(self.path, message)

    def spend(self, what: str, *, memory: int, work: int) -> None:
        self._budget.spend(self.path, what, memory=memory, work=work)

    def need(self, size: int, what: str) -> None:
        """ModelFileError where the file ends within the next `size` bytes."""
        if size > self.size - self.at:
            raise self.error(
                f"{what} takes {size:,} bytes from byte {self.at:,} on, but the file ends at {self.size:,}: "
                "it is cut short, or a length in it is wrong"
            )

    def take(self, size: int, what: str) -> int:
        """Steps over `size` bytes and says where they start."""
        self.need(size, what)
        start = self.at
        self.at += size
        return start

    def u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self.data, self.take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self.data, self.take(8, what))[0]
        return value

    def text(self, what: str) -> str:
        length = self.u64(f"the length of {what}")
        start = self.take(length, what)
        self.spend(what, memory=64 + 4 * length, work=5 + length // 100)
        try:
            return str(self.data[start : start + length], "utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8 at byte {start + error.start:,} of the file") from None

    def name(self, what: str) -> str:
        """A key or a tensor's name: a string that is short and not empty."""
        self.need(8, what)
        length: int = _U64.unpack_from(self.data, self.at)[0]
        if not 1 <= length <= NAME_BYTES:
            raise self.error(f"{what} must be 1 to {NAME_BYTES:,} bytes long, not {length:,}")
        return self.text(what)


def _preamble(cursor: _Cursor) -> tuple[int, int]:
    """How many tensors and how many metadata the file says it has; as many at least could be in it."""
    start = bytes(cursor.data[:16])
    if start[:4] != b"GGUF":
        if start == b"version https://":
            raise cursor.error("is a Git LFS pointer, not the model itself; fetch it with `git lfs pull`")
        raise cursor.error(f"is not a GGUF file: it starts with {start[:4]!r} instead of b'GGUF'")
    cursor.at = 4
    version = cursor.u32("the version")
    if version not in (2, 3):
        if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, 2, 3):
            raise cursor.error("is a big-endian GGUF file; only little-endian ones can be read")
        raise cursor.error(f"is GGUF version {version}; versions 2 and 3 can be read")
    tensors = cursor.u64("the number of tensors")
    pairs = cursor.u64("the number of metadata")
    cursor.need(pairs * 14, f"a list of {pairs:,} metadata (14 bytes each at least)")
    cursor.need(tensors * 33, f"a list of {tensors:,} tensors (33 bytes each at least)")
    return tensors, pairs


def _metadata(cursor: _Cursor, pairs: int) -> tuple[dict[str, Any], int]:
    """The metadata, and the alignment of the tensors."""
    metadata: dict[str, Any] = {}
    alignment = 32
    for index in range(pairs):
        cursor.spend("metadata", memory=256, work=20)
        key = cursor.name(f"the key of metadata {index + 1} of {pairs}")
        if key in metadata:
            raise cursor.error(f"metadata key {key!r} is there twice")
        kind = cursor.u32(f"the type of metadata {key!r}")
        metadata[key] = _value(cursor, kind, f"metadata {key!r}")
        if key == "general.alignment":
            alignment = metadata[key] if kind == _UINT32 else 0
            if alignment < 8 or alignment & (alignment - 1):
                found = alignment if kind == _UINT32 else f"of metadata type {kind}"
                raise cursor.error(f"metadata {key!r} must be a uint32, a power of two of at least 8, not {found}")
    return metadata, alignment


def _value(cursor: _Cursor, kind: int, what: str, depth: int = 0) -> Any:
    if kind == _STRING:
        return cursor.text(what)
    if kind == _ARRAY:
        return _array(cursor, what, depth + 1)
    return _numbers(cursor, kind, 1, what)[0].item()


def _array(cursor: _Cursor, what: str, depth: int) -> Any:
    if depth > DEPTH:
        raise cursor.error(f"{what} has arrays within arrays more than {DEPTH} deep")
    kind = cursor.u32(f"the element type of {what}")
    count = cursor.u64(f"the length of {what}")
    if kind in _NUMBERS:
        values = _numbers(cursor, kind, count, what)
        return values.tolist() if count <= SMALL else values
    if kind == _STRING and count > SMALL:
        return _string_array(cursor, count, what)
    if kind not in (_STRING, _ARRAY):
        raise cursor.error(f"{what} has elements of the unknown metadata type {kind}")
    least = 8 if kind == _STRING else 12
    cursor.need(count * least, f"{what}, an array of {count:,} elements ({least} bytes each at least),")
    cursor.spend(what, memory=count * 128, work=count * 30)
    return [_value(cursor, kind, f"element {i} of {what}", depth) for i in range(count)]


def _numbers(cursor: _Cursor, kind: int, count: int, what: str) -> np.ndarray:
    """[count] numbers, a view of the file."""
    if kind not in _NUMBERS:
        raise cursor.error(f"{what} has the unknown metadata type {kind}")
    dtype = _NUMBERS[kind]
    start = cursor.take(count * dtype.itemsize, what)
    cursor.spend(what, memory=128 + 40 * min(count, SMALL), work=10 + count // 100)
    if not count:
        return np.empty(0, dtype)
    values = np.frombuffer(cursor.data, dtype, count, start)
    if kind == _BOOL and values.view(np.uint8).max() > 1:
        raise cursor.error(f"{what} is a bool, but stored as neither 0 nor 1")
    return values


def _string_array(cursor: _Cursor, count: int, what: str) -> StringArray:
    cursor.need(count * 8, f"{what}, an array of {count:,} strings (8 bytes each at least),")
    cursor.spend(what, memory=count * 32, work=count * 2)
    starts = array("q")
    data, at, last = cursor.data, cursor.at, cursor.size - 8
    unpack, append = _U64.unpack_from, starts.append
    for _ in range(count):
        if at > last:
            break
        append(at)
        at += 8 + unpack(data, at)[0]
    if at > cursor.size:
        raise cursor.error(
            f"string {len(starts) - 1:,} of {what} ends at byte {at:,}, but the file at {cursor.size:,}: "
            "it is cut short, or a length in it is wrong"
        )
    begin, cursor.at = cursor.at, at
    if len(starts) < count:
        cursor.need(8, f"the length of string {len(starts):,} of {what}")
    append(at)
    places = np.frombuffer(starts, np.int64)
    _check_utf8(cursor, places, what)
    return StringArray(data[begin:at], places - begin)


def _check_utf8(cursor: _Cursor, starts: np.ndarray, what: str) -> None:
    """Checks all strings as one text: a length of under 128 is ASCII as it stands, the others are blanked in a copy."""
    begin, end = int(starts[0]), int(starts[-1])
    cursor.spend(what, memory=0, work=(end - begin) // 100)
    long = starts[:-1][np.diff(starts) >= 8 + 128]
    decoder = codecs.getincrementaldecoder("utf-8")()
    for at in range(begin, end, _CHUNK):
        piece = np.frombuffer(cursor.data, np.uint8, min(_CHUNK, end - at), at).copy()
        here = long[np.searchsorted(long, at - 7) : np.searchsorted(long, at + len(piece))]
        lengths = (here[:, None] + np.arange(8) - at).ravel()
        piece[lengths[(lengths >= 0) & (lengths < len(piece))]] = 0
        last = at + len(piece) == end
        try:
            decoder.decode(piece.data, last)
        except UnicodeDecodeError as error:
            place = at + len(piece) - len(error.object) + error.start
            index = int(np.searchsorted(starts, place, "right")) - 1
            raise cursor.error(f"string {index:,} of {what} is not UTF-8 at byte {place:,} of the file") from None


def _tensors(cursor: _Cursor, count: int, alignment: int) -> list[PlacedTensor]:
    found: dict[str, PlacedTensor] = {}
    for index in range(count):
        cursor.spend("the list of tensors", memory=1024, work=60)
        name = cursor.name(f"the name of tensor {index + 1} of {count}")
        if name in found:
            raise cursor.error(f"tensor {name!r} is there twice")
        info, offset = _tensor(cursor, name)
        if offset % alignment:
            raise cursor.error(f"tensor {name!r} has the offset {offset:,}, which is not a multiple of {alignment}")
        found[name] = PlacedTensor(info, offset)
    data = _padded(cursor.at, alignment)
    tensors = [PlacedTensor(tensor.info, data + tensor.start) for tensor in found.values()]
    _check_places(cursor, tensors, data, alignment)
    return tensors


def _tensor(cursor: _Cursor, name: str) -> tuple[TensorInfo, int]:
    """A tensor's info and its offset; its whole size is known to make sense, its place not yet."""
    what = f"tensor {name!r}"
    axes = cursor.u32(f"the number of dimensions of {what}")
    if not 1 <= axes <= 4:
        raise cursor.error(f"{what} has {axes:,} dimensions; 1 to 4 are possible")
    shape = tuple(reversed([cursor.u64(f"the shape of {what}") for _ in range(axes)]))
    if 0 in shape:
        raise cursor.error(f"{what} has a dimension of 0: {list(shape)}")
    number = cursor.u32(f"the type of {what}")
    kind = TENSOR_TYPES[number] if number < len(TENSOR_TYPES) else ""
    if kind not in FORMATS:
        named = f"{kind} (number {number})" if kind else f"number {number}"
        raise cursor.error(f"{what} has the type {named}, which is not supported; known are {', '.join(FORMATS)}")
    form = FORMATS[kind]
    if shape[-1] % form.block:
        raise cursor.error(
            f"{what} is {kind} with lines of {shape[-1]:,} numbers, which are not whole blocks of {form.block}"
        )
    size = prod(shape) // form.block * form.block_bytes
    return TensorInfo(name, shape, kind, size), cursor.u64(f"the offset of {what}")


def _check_places(cursor: _Cursor, tensors: list[PlacedTensor], data: int, alignment: int) -> None:
    """From byte `data` on there is nothing but tensors and their padding: bytes that belong to none mean that a type, a
    shape or an offset is wrong, and that other numbers would be read than were written."""
    before, end = "", data
    for tensor in sorted(tensors, key=lambda tensor: tensor.start):
        info = tensor.info
        if tensor.start < end:
            raise cursor.error(f"tensors {before!r} and {info.name!r} lie on each other: an offset or a shape is wrong")
        own_end = tensor.start + info.nbytes
        if own_end > cursor.size:
            raise cursor.error(
                f"tensor {info.name!r} ({info.format} {list(info.shape)}) ends at byte {own_end:,}, but the file at "
                f"{cursor.size:,}: it is cut short, or the offset or shape is wrong"
            )
        if tensor.start > _padded(end, alignment):
            raise cursor.error(_left_over(before, end, f"tensor {info.name!r} begins at {tensor.start:,}"))
        before, end = info.name, own_end
    if tensors and cursor.size > _padded(end, alignment):
        raise cursor.error(_left_over(before, end, f"the file ends at {cursor.size:,}"))


def _left_over(before: str, end: int, then: str) -> str:
    ended = f"tensor {before!r} ends" if before else "the list of tensors and its padding end"
    return f"{ended} at byte {end:,}, but {then}, which is more than padding: a type, a shape or an offset is wrong"


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
