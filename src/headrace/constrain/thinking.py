"""Answers that begin with thinking: the grammar, where there is one, holds for what comes after it."""

from __future__ import annotations

from headrace.constrain.constraint import EVERY, Constraint, Words
from headrace.params import Reasoning


class Thinking:
    """`Constraint`: tokens up to the end of the thinking, which is forced once the budget is spent; then what `then`
    allows. An answer that begins with another token than the one that begins a thinking has none.
    """

    def __init__(self, reasoning: Reasoning, then: Constraint | None) -> None:
        self._reasoning = reasoning
        self._then = then
        self._taken = 0
        self._thought: int | None = 0 if reasoning.begun else None
        """Tokens of thinking so far; None where it has not begun."""
        self._over: int | None = None
        """How many tokens were taken when there was no more thinking to come."""

    @property
    def accepting(self) -> bool:
        if self._thinks:
            return self._then is None and not self._spent
        return self._then is None or self._then.accepting

    @property
    def done(self) -> bool:
        return self._then is not None and not self._thinks and self._then.done

    def fill(self, line: Words) -> None:
        if self._thinks:
            line[:] = 0 if self._spent else EVERY
            _allow(line, self._reasoning.end)
        elif self._then is None:
            line[:] = EVERY
        else:
            self._then.fill(line)
            if self._over is None:
                _allow(line, self._reasoning.begin)

    def take(self, token: int) -> None:
        if self._over is None and self._thought is None:
            if token == self._reasoning.begin:
                self._thought = 0
            else:
                self._over = 0
        elif self._thinks:
            if token == self._reasoning.end:
                self._over = self._taken + 1
            else:
                self._thought = (self._thought or 0) + 1
        self._taken += 1
        if self._then is not None and self._over is not None and self._taken > self._over:
            self._then.take(token)

    def rollback(self, count: int) -> None:
        left = self._taken - count
        if self._then is not None and self._over is not None:
            self._then.rollback(min(count, self._taken - self._over))
        if self._over is None or left < max(self._over, 1):  # what is left is thinking, or nothing
            self._over = None
            before = 0 if self._reasoning.begun else 1
            self._thought = left - before if left >= before else None
        self._taken = left

    @property
    def _thinks(self) -> bool:
        return self._over is None and self._thought is not None

    @property
    def _spent(self) -> bool:
        budget = self._reasoning.budget
        return budget is not None and (self._thought or 0) >= budget


def _allow(line: Words, token: int) -> None:
    line[token // 32] |= 1 << (token % 32)
