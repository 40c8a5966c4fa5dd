"""`GGUF`, a `Source` over one GGUF file or all parts of a split one. Knows how parts belong together; the grammar of
one file is gguf_header.py's, what the metadata mean is not known here."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import ModelFileError
from headrace.formats import FORMATS
from headrace.formats.format import Format
from headrace.loading.choice import split
from headrace.loading.gguf_header import Header, read_header
from headrace.loading.mapped import Budget, FileState, forget, map_known, mapped_bytes
from headrace.loading.source import TensorInfo


class GGUF:
    """One model in GGUF, opened: versions 2 and 3, little endian, memory-mapped.

    Where the file is called `…-00001-of-0000N.gguf`, all its parts are opened, whichever of them was named; metadata
    are the first one's. Metadata are plain Python values: int, float, bool, str, lists of them (also nested); arrays
    of over 1,024 elements are NumPy arrays or, of strings, a lazy `Sequence[str]`.

    ModelFileError, naming the file and the part of it, for anything that is not as it must be: nothing is left to be
    found when a tensor is read. Opening takes no memory to speak of, and no broken or hostile file more than 64 MiB
    above its own size or more than a second.
    """

    kind = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.metadata: Mapping[str, Any] = {}
        self.tensors: Mapping[str, TensorInfo] = {}
        files: dict[Path, FileState] = {}
        self._maps: list[mmap.mmap] = []
        tensors: dict[str, TensorInfo] = {}
        self._places: dict[str, tuple[int, int]] = {}
        budget = Budget()
        parts = _parts(self.path)
        for number, part in enumerate(parts):
            data, files[part] = map_known(part)
            budget.allow(len(data))
            header = read_header(part, data, budget)
            _check_part(part, header, number, len(parts))
            for tensor in header.tensors:
                if tensor.info.name in tensors:
                    raise ModelFileError(part, f"tensor {tensor.info.name!r} is in an earlier part too")
                tensors[tensor.info.name] = tensor.info
                self._places[tensor.info.name] = (number, tensor.start)
            if not number:
                self.metadata = header.metadata
            self._maps.append(data)
        self.tensors = tensors
        self.files: Mapping[Path, FileState] = files
        expected = _count(parts[0], self.metadata, "split.tensors.count", len(tensors))
        if expected != len(tensors):
            raise ModelFileError(parts[0], f"split.tensors.count is {expected}, but all parts hold {len(tensors)}")

    def read(self, name: str) -> Format:
        """The tensor, its data a read-only view of the mapped file, which it keeps alive. KeyError for an unknown name,
        ValueError after `close`."""
        info = self.tensors[name]
        if not self._maps:
            raise ValueError(f"{self.path} was closed")
        part, start = self._places[name]
        form = FORMATS[info.format]
        lines = (*info.shape[:-1], form.line_bytes(info.shape[-1]))
        return form(info.shape, mapped_bytes(self._maps[part], start, lines))

    def forget(self) -> None:
        """Gives memory back that reading tensors took; they stay valid and are read from disk again where needed."""
        forget(self._maps)

    def close(self) -> None:
        """Lets go of the files. Tensors and arrays handed out stay valid."""
        self._maps.clear()


def _parts(path: Path) -> list[Path]:
    """The files of the model that `path` belongs to; they are all there."""
    named = split(path.name)
    if named is None or named.parts == 1:
        return [path]
    count = named.parts
    if not 1 <= named.part <= count:
        raise ModelFileError(path, f"is called part {named.part} of {count}")
    if not os.path.lexists(path):
        raise ModelFileError(path, "does not exist")
    parts = []
    for number in range(1, count + 1):
        part = path.with_name(named.name(number))
        if not os.path.lexists(part):
            raise ModelFileError(path, f"part {number} of {count} is missing: {part.name} must be in the same folder")
        parts.append(part)
    return parts


def _check_part(path: Path, header: Header, number: int, count: int) -> None:
    """The metadata of part `number` (from 0) of `count` agree with the files' names."""
    own_count = _count(path, header.metadata, "split.count", 0 if count > 1 else 1)
    own_number = _count(path, header.metadata, "split.no", 0)
    if own_count == count and own_number == number:
        return
    if count > 1:
        raise ModelFileError(
            path, f"its name says part {number + 1} of {count}, but split.no is {own_number}, split.count {own_count}"
        )
    raise ModelFileError(
        path,
        f"is one part of a model (split.no {own_number}, split.count {own_count}), but not called so; give the parts "
        "their names …-00001-of-0000N.gguf back",
    )


def _count(path: Path, metadata: Mapping[str, Any], key: str, default: int) -> int:
    value = metadata.get(key, default)
    if not isinstance(value, int):
        raise ModelFileError(path, f"metadata {key!r} must be a whole number")
    return value
