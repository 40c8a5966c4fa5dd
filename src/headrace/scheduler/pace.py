"""How many tokens of prompts a step may take up, so that answers keep their pace, and nobody waits long for the end
of a step: from measured times.

Knows no requests. A step is taken to last as long as one of answers alone, and so much longer for each other token.
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
KNOWN = 9
"""Steps of each kind that are remembered; a median bears with a few that something else held up."""


class Pace:
    """Steps of at most `step_s` seconds; without it of what `SLOWER` and `GRACE_S` say where somebody is answering,
    else of `LONGEST_S`."""

    def __init__(self, step_s: float | None = None) -> None:
        self._step_s = step_s
        self._alone: deque[float] = deque(maxlen=KNOWN)
        self._each: deque[float] = deque(maxlen=KNOWN)

    def took(self, answers: int, others: int, seconds: float) -> None:
        """A step of `answers` rows of one token and of `others` tokens in longer rows."""
        if not others:
            self._alone.append(seconds)
        elif not answers or self._alone:
            self._each.append(max(0.0, seconds - (self._answers_s if answers else 0.0)) / others)

    def others(self, answers: int) -> int:
        """Tokens of longer rows that may join `answers` rows; at least one, so that they get on."""
        if not self._each:
            return 2**31
        beside = self._answers_s if answers and self._alone else 0.0
        if self._step_s is not None:
            allowed = self._step_s
        else:
            allowed = SLOWER * beside + GRACE_S if beside else LONGEST_S
        each = median(self._each)
        return max(1, math.floor((allowed - beside) / each)) if each > 0 else 2**31

    @property
    def token_s(self) -> float | None:
        """Seconds that one token of a prompt takes."""
        return median(self._each) if self._each else None

    @property
    def _answers_s(self) -> float:
        """Of the last the quickest: nothing measures it anew while a long prompt is computed, so a moment in which the
        machine was slow must not last as long."""
        return min(self._alone)
