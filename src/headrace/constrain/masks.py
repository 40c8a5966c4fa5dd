"""Fills the masks of a step, in a thread of its own while the step's program runs. Knows constraints and ints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from headrace.constrain.constraint import Constraint, ConstraintError, Words
from headrace.execute.plan import Mask, Masks


@dataclass(frozen=True, slots=True)
class Asked:
    """A row whose next tokens are constrained."""

    request: int
    constraint: Constraint
    ends: frozenset[int]
    """Tokens that end the answer, where the constraint lets it end."""
    drafts: tuple[int, ...] = ()


class Filler:
    """Of one engine. `width` is that of the logits; `eos` are the model's end tokens, which no answer may have inside.

    The thread starts with the first constrained row.
    """

    def __init__(self, width: int, eos: frozenset[int]) -> None:
        self._words = -(-width // 32)
        self._eos = eos
        self._thread: ThreadPoolExecutor | None = None

    def begin(self, asked: Sequence[Asked]) -> Masks | None:
        """Begin to fill the masks of a step. Until they are there nobody else touches these constraints."""
        if not asked:
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="headrace-masks")
        try:
            return self._thread.submit(self._fill, asked).result
        except RuntimeError:  # the system has no thread to give
            filled = self._fill(asked)
            return lambda: filled

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def _fill(self, asked: Iterable[Asked]) -> dict[int, Mask]:
        return {one.request: self._mask(one) for one in asked}

    def _mask(self, one: Asked) -> Mask:
        lines = np.zeros((1 + len(one.drafts), self._words), np.uint32)
        taken, error = 0, None
        try:
            for draft, line in zip((*one.drafts, None), lines, strict=True):
                self._line(one, line)
                if draft is None or not _allows(line, draft):
                    break  # behind a draft that is not allowed no line is read
                one.constraint.take(draft)
                taken += 1
        except ConstraintError as problem:
            if not taken:
                error = str(problem)  # behind a draft it would not have come up without drafts
        finally:
            one.constraint.rollback(taken)
        return Mask(lines, error)

    def _line(self, one: Asked, line: Words) -> None:
        one.constraint.fill(line)
        line &= ~_bits(self._eos, self._words)
        ends = _bits(one.ends, self._words)
        if one.constraint.accepting:
            line |= ends
        else:
            line &= ~ends


@lru_cache(maxsize=64)
def _bits(tokens: frozenset[int], words: int) -> Words:
    """A line that allows these tokens; those beyond the logits cannot be chosen anyway."""
    line = np.zeros(words, np.uint32)
    ids = np.fromiter((token for token in tokens if token < 32 * words), np.uint32)
    np.bitwise_or.at(line, ids // 32, np.uint32(1) << ids % 32)
    return line


def _allows(line: Words, token: int) -> bool:
    return bool(line[token // 32] >> (token % 32) & 1)
