"""`Format`, the seam for how numbers are stored: an instance is one stored tensor, a subclass is one format.

Operations never ask which format a weight has; a backend does, once, when it takes the weights over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

SLICE = 1 << 18
"""Numbers decoded at a time: 1 MiB of float32 and temporaries of about as much, which stay in the cache."""


@dataclass(frozen=True, eq=False)
class Format(ABC):
    """One stored tensor.

    `shape` is logical, outermost first; the last axis is the input axis of a linear and the one blocks run along.
    `data` is uint8 [*shape[:-1], bytes of one line], usually a view of a mapped file: never write to it.
    A scalar, shape (), is stored as a line of one number.
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
        expected = (*self.shape[:-1], self.line_bytes(self.shape[-1] if self.shape else 1))
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
    def decode_into(cls, blocks: np.ndarray, out: np.ndarray) -> None:
        """Writes the numbers of uint8 [n, block_bytes] to float32 [n, block]: the definition of the format, bit for
        bit. Temporaries are of the size of `out`; floating-point warnings are the caller's to silence."""

    @classmethod
    def decode(cls, blocks: np.ndarray) -> np.ndarray:
        """float32 [n, block], newly allocated, out of uint8 [n, block_bytes]. Temporaries stay at a few MiB."""
        out = np.empty((len(blocks), cls.block), np.float32)
        step = max(1, SLICE // cls.block)
        with np.errstate(all="ignore"):  # infinite and NaN scales are legal bits, whatever they decode to
            for start in range(0, len(blocks), step):
                cls.decode_into(blocks[start : start + step], out[start : start + step])
        return out

    def dense(self) -> np.ndarray:
        """The whole tensor as float32 [*shape], newly allocated."""
        return self.decode(self.data.reshape(-1, self.block_bytes)).reshape(self.shape)

    def shard(self, rows: slice | np.ndarray) -> Self:
        """Some lines of the first axis (outputs, vocabulary), in the order asked for. A slice copies nothing.

        The first axis of a vector (a bias, a norm's weight) is its numbers; ValueError where they are not stored
        one by one, and for a scalar.
        """
        if len(self.shape) > 1:
            data = self.data[rows]
            return type(self)((data.shape[0], *self.shape[1:]), data)
        if not self.shape or self.block != 1:
            raise ValueError(f"{self.name} {self.shape} has no lines to choose from")
        numbers = self.data.reshape(-1, self.block_bytes)[rows]
        return type(self)((numbers.shape[0],), numbers.reshape(-1))

    @property
    def nbytes(self) -> int:
        return self.data.nbytes
