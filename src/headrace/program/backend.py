"""The line between a program and who runs it. A backend takes the weights over once and then runs batches."""

from __future__ import annotations

from collections import Counter
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

    @property
    def name(self) -> str:
        """Of its format."""


@dataclass(frozen=True, slots=True)
class Announced:
    """A tensor that is not read yet."""

    shape: tuple[int, ...]
    name: str


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


@dataclass(frozen=True, slots=True)
class PackedPart:
    """A weight and its place among all packed ones."""

    name: str
    format: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """How a backend packs the weights of a program: the same layout and the same file give the same bytes."""

    version: str
    """Of the backend's way to pack."""
    parts: tuple[PackedPart, ...]
    nbytes: int


class PackedStore(Protocol):
    """Packed weights of one model, kept between runs."""

    def get(self, layout: PackedLayout) -> np.ndarray | None:
        """uint8 [layout.nbytes], read-only, from a boundary of 64 bytes on; None where they are not kept."""

    def put(self, layout: PackedLayout, packed: np.ndarray) -> None:
        """Keep them, if possible. Returns at once; `packed` must not be written to any more."""


class Runner(Protocol):
    """A program with its weights, ready."""

    def run(self, batch: Batch) -> np.ndarray:
        """float32 [wanted, width]: the final hidden states of the wanted tokens. Keys and values go to the pool.

        A row whose numbers are not finite stays so in the result; no other row is touched by it.
        """

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """float32 [n, vocab] out of n lines of what `run` gave. The caller may overwrite it."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Member:
    """Who serves one kind of operation here."""

    operation: str
    format: str
    """Of its weight, or of the keys and values it touches; "" where it has neither."""
    count: int
    """How often the program has it."""
    served_by: str
    how: str
    """What is special about it, in words."""


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest step."""

    tokens: int
    wanted: int
    """Tokens whose hidden states are wanted."""
    at_once: int
    """Lines of logits that are made at a time."""
    threads: int
    context: int
    """Tokens of the longest request."""


class Backend(Protocol):
    """Who runs programs."""

    name: str
    arithmetic: str
    """Another word for every way to compute that may give other bits, or lays them out otherwise in a block."""
    because: str
    """Why this member of it, in words."""

    def lacks(self, program: Program) -> str | None:
        """Why it cannot run this program; None: it can."""

    def members(self, program: Program, weights: Mapping[str, Shaped], kv_format: str) -> list[Member]:
        """Who serves each kind of operation and format, in the program's order, over a pool of `kv_format`."""

    def load(
        self,
        program: Program,
        weights: Mapping[str, Format],
        pool: Pool,
        threads: int,
        progress: BytesTaken | None = None,
        store: PackedStore | None = None,
    ) -> Runner:
        """Take the weights over (they may be views of a mapped file, which is not needed afterwards). `store` may have
        them packed already; a backend that does not pack leaves it alone."""

    def weight_bytes(self, weights: Mapping[str, Shaped]) -> int:
        """Memory the weights will take once loaded."""

    def buffer_bytes(self, program: Program, weights: Mapping[str, Shaped], most: Largest) -> int:
        """Memory that steps take beside weights and pool, none larger than `most`."""


def count_members(
    program: Program,
    weights: Mapping[str, Shaped],
    kv_format: str,
    served_by: str,
    how: Callable[[str, Shaped | None], str],
) -> list[Member]:
    """One member for each kind of operation and format of matrix in a program; `how` describes it."""
    counts: Counter[tuple[str, str]] = Counter()
    words: dict[tuple[str, str], str] = {}
    for op in (*program.body, *program.head):
        weight = weights.get(op.weights[0]) if op.weights else None
        matrix = weight if weight is not None and len(weight.shape) == 2 else None
        key = (op.kind, matrix.name if matrix is not None else kv_format if op.kind in ("store", "attend") else "")
        counts[key] += 1
        words.setdefault(key, how(op.kind, matrix))
    return [Member(kind, name, count, served_by, words[kind, name]) for (kind, name), count in counts.items()]
