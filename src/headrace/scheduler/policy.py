"""Who runs next: the seam between a scheduler that makes plans and the rule by which requests take turns.

A policy sees requests and decides; it must not change them and knows neither blocks nor the executor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headrace.scheduler.request import Request


class Policy(Protocol):
    """One way of taking turns."""

    @property
    def retry_s(self) -> float | None:
        """Seconds after which `admits` may answer otherwise though nothing happened; None where time plays no part."""

    def rank(self, request: Request) -> tuple[int, ...]:
        """Lower goes first in queue and plan, the highest running is preempted first. Asked once; unique."""

    def admits(self, waiting: Sequence[Request], running: Sequence[Request], now: float) -> int:
        """How many of the first of `waiting` may join now, blocks and rows permitting. Both are sorted by rank."""


class Continuous:
    """First come, first served, at every step (iteration-level scheduling: Yu et al. 2022, Orca).

    Nobody overtakes, so a newcomer waits at most for what stood before it, and whoever is preempted, always the latest,
    is again the first of the queue.
    """

    retry_s: float | None = None

    def rank(self, request: Request) -> tuple[int, ...]:
        return (request.order, request.choice)

    def admits(self, waiting: Sequence[Request], running: Sequence[Request], now: float) -> int:
        return len(waiting)
