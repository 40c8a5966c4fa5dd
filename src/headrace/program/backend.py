"""The line between a program and who runs it. A backend takes the weights over once and then runs batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from headrace.cache.pool import Pool
from headrace.formats.format import Format
from headrace.program.program import Program

BytesTaken = Callable[[int, int], None]
"""(bytes done, bytes in all), of the weights as they are stored."""


class Shaped(Protocol):
    """A tensor, stored or only announced."""

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one plan as arrays; all int32, C-contiguous."""

    tokens: np.ndarray
    """[tokens] ids, row after row."""
    positions: np.ndarray
    """[tokens] absolute positions."""
    offsets: np.ndarray
    """[rows + 1]: row r has the tokens offsets[r] : offsets[r + 1]."""
    lengths: np.ndarray
    """[rows]: tokens in the pool after this step = position of the row's last token + 1."""
    tables: tuple[np.ndarray, ...]
    """Per KV group [rows, most blocks of a row]; -1 where there is none or it is out of the window."""
    wanted: np.ndarray
    """[wanted] ascending indices into `tokens` whose hidden state is wanted."""


class Runner(Protocol):
    """A program with its weights, ready."""

    def run(self, batch: Batch) -> np.ndarray:
        """float32 [wanted, width]: the final hidden states of the wanted tokens. Keys and values go to the pool.

        A row whose numbers are not finite stays so in the result; no other row is touched by it.
        """

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """float32 [n, vocab] out of n lines of what `run` gave. The caller may overwrite it."""

    def close(self) -> None: ...


class Backend(Protocol):
    """Who runs programs."""

    name: str

    def load(
        self,
        program: Program,
        weights: Mapping[str, Format],
        pool: Pool,
        threads: int,
        progress: BytesTaken | None = None,
    ) -> Runner:
        """Take the weights over (they may be views of a mapped file, which is not needed afterwards)."""

    def weight_bytes(self, weights: Mapping[str, Shaped]) -> int:
        """Memory the weights will take once loaded."""
