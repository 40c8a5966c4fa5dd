"""`Format`, the seam for how numbers are stored: an instance is one stored tensor, a subclass is one format.

Operations never ask which format a weight has; a backend does, once, when it takes the weights over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np


@dataclass(frozen=True, eq=False)
class Format(ABC):
    """One stored tensor.

    `shape` is logical, outermost first; the last axis is the input axis of a linear and the one blocks run along.
    `data` is uint8 [*shape[:-1], bytes of one line], usually a view of a mapped file: never write to it.
    """

    shape: tuple[int, ...]
    data: np.ndarray

    name: ClassVar[str]
    """As files spell it: "F32", "Q4_K"."""
    block: ClassVar[int]
    """Numbers in one block."""
    block_bytes: ClassVar[int]
    """Bytes of one block."""

    def __post_init__(self) -> None:
        expected = (*self.shape[:-1], self.line_bytes(self.shape[-1]))
        if self.data.dtype != np.uint8 or self.data.shape != expected:
            raise ValueError(
                f"{self.name} {self.shape}: data must be uint8 {expected}, not {self.data.dtype} {self.data.shape}"
            )

    @classmethod
    def line_bytes(cls, length: int) -> int:
        """Bytes of one line of `length` numbers; ValueError where `length` is not whole blocks."""
        if length % cls.block:
            raise ValueError(f"{cls.name} stores lines of whole blocks of {cls.block} numbers, not {length}")
        return length // cls.block * cls.block_bytes

    @classmethod
    @abstractmethod
    def decode(cls, blocks: np.ndarray) -> np.ndarray:
        """float32 [n, block] out of uint8 [n, block_bytes]: the definition of the format, bit for bit."""

    def dense(self) -> np.ndarray:
        """The whole tensor as float32 [*shape], newly allocated."""
        return self.decode(self.data.reshape(-1, self.block_bytes)).reshape(self.shape)

    def shard(self, rows: slice | np.ndarray) -> Self:
        """Some lines of the first axis (outputs, vocabulary), in the order asked for. A slice copies nothing."""
        data = self.data[rows]
        return type(self)((data.shape[0], *self.shape[1:]), data)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes
