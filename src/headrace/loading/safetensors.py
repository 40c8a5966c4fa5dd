"""`Safetensors`, a `Source` over a folder in Hugging Face's layout: config.json and one or many *.safetensors files.

Knows the safetensors format and the index of a sharded model; neither families nor what the tensors are for.
Source: the format's description in huggingface/safetensors:

    length u64 (little endian), then as many bytes of JSON, then the tensors' bytes
    JSON: name -> {"dtype", "shape" (outermost first), "data_offsets": [begin, end] after the header}, and
          "__metadata__": string -> string
    The tensors cover all bytes after the header, without holes and without lying on each other.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

from headrace.errors import ModelFileError
from headrace.formats import FORMATS
from headrace.formats.format import Format
from headrace.loading import choice
from headrace.loading.bounded_json import parse_json_object, read_json_object
from headrace.loading.choice import INDEX
from headrace.loading.mapped import Budget, FileState, forget, map_known, mapped_bytes
from headrace.loading.source import PlacedTensor, TensorInfo

CONFIG = "config.json"

AXES = 8
"""Most dimensions of a tensor."""

READABLE = ("F32", "F16", "BF16")
"""dtypes that are formats too."""

DTYPE_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Every dtype the format knows, whether it can be read here or not."""


class Safetensors:
    """A folder with config.json and weights, opened and memory-mapped.

    Weights are what `choice` says: model.safetensors, else the shards that the index names, else every *.safetensors
    but adapters and copies in other layouts.
    `metadata` is config.json. Tensors may have any dtype as long as nobody reads them: `read` gives F32, F16 and BF16.

    ModelFileError, naming the file and the part of it, for anything that is not as it must be.
    """

    kind = "safetensors"

    def __init__(self, folder: Path) -> None:
        self.path = Path(folder)
        if not self.path.is_dir():
            raise ModelFileError(self.path, "is not a folder with config.json and safetensors files")
        budget = Budget()
        self.metadata: Mapping[str, Any] = read_json_object(self.path / CONFIG, budget)
        listed = _listed(self.path)
        weight_map = _weight_map(self.path, budget) if choice.needs_index(listed) else None
        names = sorted(set(weight_map.values())) if weight_map is not None else _unindexed(self.path, listed)
        tensors: dict[str, TensorInfo] = {}
        states: dict[Path, FileState] = {}
        self._maps: list[mmap.mmap] = []
        self._places: dict[str, tuple[int, int]] = {}
        files: dict[str, str] = {}
        for number, name in enumerate(names):
            path = self.path / name
            data, states[path] = map_known(path)
            budget.allow(len(data))
            for tensor in _read_header(path, data, budget):
                own = tensor.info.name
                if own in files:
                    raise ModelFileError(path, f"tensor {own!r} is in {files[own]} too")
                files[own] = name
                tensors[own] = tensor.info
                self._places[own] = (number, tensor.start)
            self._maps.append(data)
        if weight_map is not None:
            _check_index(self.path / INDEX, weight_map, files)
        self.tensors: Mapping[str, TensorInfo] = tensors
        self.files: Mapping[Path, FileState] = states

    def read(self, name: str) -> Format:
        """The tensor, its data a read-only view of the mapped file, which it keeps alive. KeyError for an unknown name,
        ModelFileError for a dtype that is no format, ValueError after `close`."""
        info = self.tensors[name]
        if info.format not in READABLE:
            known = ", ".join(READABLE)
            raise ModelFileError(
                self.path, f"tensor {name!r} is {info.format}, which cannot be read; known are {known}"
            )
        if not self._maps:
            raise ValueError(f"{self.path} was closed")
        number, start = self._places[name]
        form = FORMATS[info.format]
        lines = (*info.shape[:-1], form.line_bytes(info.shape[-1] if info.shape else 1))
        return form(info.shape, mapped_bytes(self._maps[number], start, lines))

    def forget(self) -> None:
        """Gives memory back that reading tensors took; they stay valid and are read from disk again where needed."""
        forget(self._maps)

    def close(self) -> None:
        """Lets go of the files. Tensors handed out stay valid."""
        self._maps.clear()


def _listed(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise ModelFileError(folder, f"cannot be read: {error.strerror}") from None


def _weight_map(folder: Path, budget: Budget) -> dict[str, str]:
    """The index of a sharded model: each tensor's file."""
    path = folder / INDEX
    found = read_json_object(path, budget).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ModelFileError(path, '"weight_map" must be an object that names the file of each tensor')
    for tensor, file in found.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or "/" in file or "\0" in file:
            raise ModelFileError(path, f"tensor {tensor!r} must be in a *.safetensors file of the folder, not {file!r}")
    for file in sorted(set(found.values())):
        if not os.path.lexists(folder / file):
            tensors = sum(1 for other in found.values() if other == file)
            raise ModelFileError(path, f"{file!r}, which holds {tensors:,} of the tensors, is missing from the folder")
    return found


def _unindexed(folder: Path, names: list[str]) -> list[str]:
    """The weight files of a folder without an index."""
    if found := choice.safetensors(names):
        return found
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    hint = f"; {pickles[0]} is a pickle, which can run code and is not read" if pickles else ""
    if others := [name for name in names if name.endswith(".safetensors")]:
        hint = f" of a whole model: {others[0]} is an adapter or a copy in another layout"
    raise ModelFileError(folder, f"has no *.safetensors file{hint}")


def _check_index(path: Path, weight_map: Mapping[str, str], files: Mapping[str, str]) -> None:
    """Every tensor is where the index says, and the index knows them all."""
    for tensor, file in weight_map.items():
        if files.get(tensor) != file:
            raise ModelFileError(
                path, f"tensor {tensor!r} should be in {file}, but is in {files.get(tensor, 'no file')}"
            )
    if extra := next((tensor for tensor in files if tensor not in weight_map), None):
        raise ModelFileError(path, f"tensor {extra!r} is in {files[extra]}, but not in the index")


def _read_header(path: Path, data: mmap.mmap, budget: Budget) -> list[PlacedTensor]:
    """The tensors of one file, each with its place within the file checked."""
    size = len(data)
    length = int.from_bytes(data[:8], "little")
    if size < 8 or length > size - 8:
        raise ModelFileError(
            path,
            f"says that its header has {length:,} bytes, but the file has only {size:,}: it is cut short, or not a "
            "safetensors file",
        )
    header = parse_json_object(path, "the header", memoryview(data)[8 : 8 + length], budget)
    _check_free_metadata(path, header.pop("__metadata__", {}))
    budget.spend(path, "the header", memory=len(header) * 768, work=len(header) * 50)
    tensors = [_tensor(path, name, entry, 8 + length) for name, entry in header.items()]
    end = 8 + length
    for tensor in sorted(tensors, key=lambda tensor: tensor.start):
        if tensor.start != end:
            raise ModelFileError(
                path,
                f"tensor {tensor.info.name!r} starts at byte {tensor.start:,} and not at {end:,}, where the one before "
                "it ends: an offset is wrong",
            )
        end += tensor.info.nbytes
        if end > size:
            break
    if end != size:
        raise ModelFileError(
            path, f"must be {end:,} bytes long or more by its header, but has {size:,}: it is cut short or damaged"
        )
    return tensors


def _tensor(path: Path, name: str, entry: object, data: int) -> PlacedTensor:
    """One entry of the header; `data` is where the tensors begin."""

    def error(message: str) -> ModelFileError:
        return ModelFileError(path, f"tensor {name!r}: {message}")

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise error('its entry must be an object with "dtype", "shape" and "data_offsets"')
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise error(f"its dtype must be a string, not {type(dtype).__name__}")
    if dtype not in DTYPE_BITS:
        raise error(f"has the dtype {dtype[:40]!r}, which safetensors does not have; known are {', '.join(DTYPE_BITS)}")
    if not _whole_numbers(shape, least=1) or len(shape) > AXES:
        raise error(f"its shape must be a list of at most {AXES} whole numbers from 1 on")
    if not _whole_numbers(offsets, least=0) or len(offsets) != 2:
        raise error("its data_offsets must be two whole numbers from 0 on")
    begin, end = offsets
    bits = prod(shape) * DTYPE_BITS[dtype]
    if bits % 8 or end - begin != bits // 8:
        raise error(f"{dtype} {shape} takes {bits:,} bits, but its data_offsets are {end - begin:,} bytes apart")
    return PlacedTensor(TensorInfo(name, tuple(shape), dtype, end - begin), data + begin)


def _whole_numbers(values: object, *, least: int) -> TypeGuard[list[int]]:
    """A list of ints, no bools, of at least `least` and of a size that a file can have."""
    return isinstance(values, list) and all(type(value) is int and least <= value < 1 << 63 for value in values)


def _check_free_metadata(path: Path, metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ModelFileError(path, '"__metadata__" must be an object of strings')
