"""When requests of the queue join those that run: the seam between a scheduler and its way of batching.

A policy sees requests and decides; it must not change them and knows neither blocks nor the executor. In which order
the queue stands is not its business but that of `scheduler.turns`: each policy goes with each order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headrace.scheduler.request import Request

PATIENCE_S = 10.0
"""Seconds without an arrival after which `Static` no longer expects its batch to fill."""


class Policy(Protocol):
    """One way of batching."""

    @property
    def retry_s(self) -> float | None:
        """Seconds after which `admits` may answer otherwise though nothing happens; None where time plays no part."""

    def admits(self, waiting: Sequence[Request], running: Sequence[Request], now: float) -> Sequence[Request]:
        """Who of `waiting`, which is not empty, may join now, in the order of the queue, blocks and rows permitting.

        `now` is time.monotonic().
        """


class Continuous:
    """Whoever waits may join at every step (iteration-level scheduling: Yu et al. 2022, Orca)."""

    retry_s: float | None = None

    def admits(self, waiting: Sequence[Request], running: Sequence[Request], now: float) -> Sequence[Request]:
        return waiting


class _Batches:
    """Batches of at most `size` choices, one after the other; nobody joins one that has begun."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.retry_s: float | None = None
        self._members: frozenset[int] = frozenset()

    def admits(self, waiting: Sequence[Request], running: Sequence[Request], patience_s: float) -> Sequence[Request]:
        """`patience_s`: how long a batch that is not full may still wait."""
        self.retry_s = None
        rest = [r for r in waiting if r.id in self._members]  # no room yet, or preempted
        if rest or running:
            return rest
        if len(waiting) < self.size and patience_s > 0:
            self.retry_s = patience_s
            return ()
        batch = waiting[: self.size]
        self._members = frozenset(r.id for r in batch)
        return batch


class Static:
    """Waits for a full batch of `size` choices and runs it to the end.

    Lest the last few wait for ever, a batch that is not full begins when nobody has come for `patience_s` seconds.
    """

    def __init__(self, size: int, patience_s: float = PATIENCE_S) -> None:
        self._batches = _Batches(size)
        self._patience_s = patience_s

    @property
    def retry_s(self) -> float | None:
        return self._batches.retry_s

    def admits(self, waiting: Sequence[Request], running: Sequence[Request], now: float) -> Sequence[Request]:
        latest = max(r.arrived for r in waiting)
        return self._batches.admits(waiting, running, latest + self._patience_s - now)


class Dynamic:
    """Begins a batch when `size` choices wait or the first has waited `max_wait_s` seconds; runs it to the end."""

    def __init__(self, size: int, max_wait_s: float) -> None:
        self._batches = _Batches(size)
        self._max_wait_s = max_wait_s

    @property
    def retry_s(self) -> float | None:
        return self._batches.retry_s

    def admits(self, waiting: Sequence[Request], running: Sequence[Request], now: float) -> Sequence[Request]:
        first = min(r.arrived for r in waiting)
        return self._batches.admits(waiting, running, first + self._max_wait_s - now)
