"""How many tokens of prompts a step may take up, so that answers keep their pace, and nobody waits long for the end
of a step: from measured times.

Knows no requests. A step is taken to last as long as one of about as many answers alone, and so much longer for each
other token.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

SLOWER = 2.0
"""Beside a prompt a step may last so many times as long as without,"""
GRACE_S = 0.015
"""and so many seconds more: a fast model's steps are short, and small pieces of a prompt cost more each."""
LONGEST_S = 0.75
"""Where nobody answers: whoever comes, or leaves, waits for the step under way."""
FEWEST = 4
"""Tokens of prompts in a step at least: they get on, also where what was measured was another load."""
KNOWN = 9
"""Steps of each kind that are remembered; a median bears with a few that something else held up."""


class Pace:
    """Steps of at most `step_s` seconds; without it of what `SLOWER` and `GRACE_S` say where somebody is answering,
    else of `LONGEST_S`."""

    def __init__(self, step_s: float | None = None) -> None:
        self._step_s = step_s
        self._alone: dict[int, deque[float]] = {}
        """Steps without prompts, by how many bits the number of answers has."""
        self._each: deque[float] = deque(maxlen=KNOWN)

    def took(self, answers: int, others: int, seconds: float) -> None:
        """A step of `answers` rows of one token and of `others` tokens in longer rows."""
        if not others:
            self._alone.setdefault(answers.bit_length(), deque(maxlen=KNOWN)).append(seconds)
        elif not answers or self._alone:
            self._each.append(max(0.0, seconds - self._without(answers)) / others)

    def others(self, answers: int) -> int:
        """Tokens of longer rows that may join `answers` rows."""
        if not self._each or (self._step_s is None and not self._alone):
            return 2**31
        without = self._without(answers)
        if self._step_s is not None:
            allowed = self._step_s
        else:
            allowed = max(SLOWER * without + GRACE_S, 0.0 if answers else LONGEST_S)
        each = median(self._each)
        return max(FEWEST, math.floor((allowed - without) / each)) if each > 0 else 2**31

    @property
    def token_s(self) -> float | None:
        """Seconds that one token of a prompt takes."""
        return median(self._each) if self._each else None

    def _without(self, answers: int) -> float:
        """How long such a step lasts without prompts. Of the last the quickest: nothing measures it anew while a long
        prompt is computed, so a moment in which the machine was slow must not last as long. A step of prompts alone
        counts as one of a single answer, because it reads all weights too."""
        if not self._alone:
            return 0.0
        bits = max(1, answers.bit_length())
        return min(self._alone[min(self._alone, key=lambda known: abs(known - bits))])
