"""How fast the queue moves: what left it in the last minute."""

from __future__ import annotations

WINDOW_S = 60


class Rate:
    """Choices, and tokens of theirs, per second. One thread adds, any may ask."""

    def __init__(self) -> None:
        self._seconds: tuple[tuple[int, int, int], ...] = ()
        """(second of the clock, choices, tokens), replaced as a whole."""

    def add(self, now: float, tokens: int) -> None:
        """One choice left the queue, by time.monotonic()."""
        at = int(now)
        kept = [s for s in self._seconds if s[0] > at - WINDOW_S]
        _, choices, before = kept.pop() if kept and kept[-1][0] == at else (at, 0, 0)
        self._seconds = (*kept, (at, choices + 1, before + tokens))

    def per_second(self, now: float) -> tuple[float, float]:
        """(choices, tokens), since the first of the last minute."""
        recent = [s for s in self._seconds if s[0] > now - WINDOW_S]
        if not recent:
            return 0.0, 0.0
        span = max(1.0, now - recent[0][0])
        return sum(s[1] for s in recent) / span, sum(s[2] for s in recent) / span
