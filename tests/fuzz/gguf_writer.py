"""A writer of small GGUF files that remembers where every length, type and offset lies, so that tests can spoil one of
them. Written after the specification, not with the reader's code."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

KINDS = {"u8": 0, "i8": 1, "u16": 2, "i16": 3, "u32": 4, "i32": 5, "f32": 6, "bool": 7, "str": 8, "array": 9}
KINDS |= {"u64": 10, "i64": 11, "f64": 12}
_CODES = {"u8": "B", "i8": "b", "u16": "H", "i16": "h", "u32": "I", "i32": "i", "f32": "f", "bool": "?"}
_CODES |= {"u64": "Q", "i64": "q", "f64": "d"}

TYPES = {"F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22)}
TYPES |= {"Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34), "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110)}
TYPES |= {"Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210), "IQ4_NL": (20, 32, 18)}
TYPES |= {"IQ4_XS": (23, 256, 136), "BF16": (30, 1, 2)}
"""Name: number, numbers in a block, bytes of a block."""


@dataclass(frozen=True)
class Field:
    """A whole number in the file."""

    at: int
    size: int


@dataclass
class Built:
    """A file's bytes and its fields by name."""

    data: bytearray = field(default_factory=bytearray)
    fields: dict[str, Field] = field(default_factory=dict)

    def put(self, what: str, value: int) -> Built:
        """A copy with one field overwritten."""
        place = self.fields[what]
        data = bytearray(self.data)
        data[place.at : place.at + place.size] = value.to_bytes(place.size, "little")
        return Built(data, self.fields)

    def number(self, what: str, value: int, size: int) -> None:
        self.fields[what] = Field(len(self.data), size)
        self.data += value.to_bytes(size, "little")

    def text(self, what: str, value: str | bytes) -> None:
        raw = value.encode() if isinstance(value, str) else value
        self.number(f"{what}: length", len(raw), 8)
        self.data += raw

    def value(self, what: str, kind: str, value: Any) -> None:
        if kind == "str":
            self.text(what, value)
        elif kind == "array":
            element, values = value
            self.number(f"{what}: element type", KINDS[element], 4)
            self.number(f"{what}: count", len(values), 8)
            for i, item in enumerate(values):
                self.value(f"{what}[{i}]", element, item)
        else:
            self.fields[what] = Field(len(self.data), struct.calcsize(_CODES[kind]))
            self.data += struct.pack("<" + _CODES[kind], value)

    def pad(self, alignment: int) -> None:
        self.data += bytes(-len(self.data) % alignment)


Metadata = list[tuple[str, str, Any]]
"""Key, kind, value; an array's value is (element kind, values)."""

Tensors = list[tuple[str, tuple[int, ...], str, bytes]]
"""Name, shape (outermost first), type, bytes."""


def build(metadata: Metadata, tensors: Tensors, *, version: int = 3, alignment: int = 32) -> Built:
    """A file with these contents; an alignment other than 32 must be among the metadata."""
    file = Built()
    file.data += b"GGUF"
    file.number("version", version, 4)
    file.number("tensors", len(tensors), 8)
    file.number("pairs", len(metadata), 8)
    for key, kind, value in metadata:
        file.text(f"key {key}", key)
        file.number(f"{key}: kind", KINDS[kind], 4)
        file.value(key, kind, value)
    offset = 0
    for name, shape, type_name, data in tensors:
        file.text(f"tensor {name}", name)
        file.number(f"{name}: axes", len(shape), 4)
        for i, size in enumerate(reversed(shape)):
            file.number(f"{name}: axis {i}", size, 8)
        file.number(f"{name}: type", TYPES[type_name][0], 4)
        file.number(f"{name}: offset", offset, 8)
        offset += len(data) + -len(data) % alignment
    if tensors:
        file.pad(alignment)
    for number, (_, _, _, data) in enumerate(tensors):
        file.data += data
        if number < len(tensors) - 1:
            file.pad(alignment)
    return file


def tensor_bytes(shape: tuple[int, ...], type_name: str, fill: int = 1) -> bytes:
    """Bytes of the right length, not all the same."""
    _, block, size = TYPES[type_name]
    total = size
    for axis in shape[:-1]:
        total *= axis
    total = total * shape[-1] // block
    return bytes((i * 7 + fill) % 251 for i in range(total))
