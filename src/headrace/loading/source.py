"""What a file format's reader gives to loading: a config in Hugging Face's words and tensors by the file's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headrace.formats.format import Format
from headrace.loading.mapped import FileState


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as the file's header declares it."""

    name: str
    shape: tuple[int, ...]
    """Outermost first, whatever order the file writes: a linear is [outputs, inputs]."""
    format: str
    """Name of its `Format`; in safetensors also a dtype that none stands for, which `read` then refuses."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor and the byte of its file that it starts at."""

    info: TensorInfo
    start: int


class Source(Protocol):
    """One model's files, headers read and every tensor's place checked against the file's size."""

    path: Path
    kind: str
    """gguf or safetensors."""
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, Any]
    """GGUF key-values; for a folder the contents of config.json."""
    files: Mapping[Path, FileState]
    """The files that hold tensors, as they were when they were mapped."""

    def read(self, name: str) -> Format:
        """The tensor, its data a read-only view of the mapped file, which it keeps alive. KeyError for an unknown name,
        ValueError after `close`."""

    def forget(self) -> None:
        """Gives memory back that reading tensors took; they stay valid and are read from disk again where needed."""

    def close(self) -> None:
        """Lets go of the files. Tensors handed out stay valid."""
