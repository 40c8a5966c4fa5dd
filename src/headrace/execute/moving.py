"""Blocks on their way between the pool and a tier, by a thread of its own, so that no step waits for a disk.

Whoever plans sees to it that nobody else writes to a block while it moves.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from headrace.cache.pool import Bytes, Pool
from headrace.execute.plan import Move, Moved

_log = logging.getLogger(__name__)

WAIT_S = 0.02
"""Longest wait for a move, so that what was posted meanwhile is seen."""


CLOSE_S = 30.0
"""Longest that the end waits for moves; what has not begun by then is left out."""


class Blobs(Protocol):
    """What is needed of a tier: `cache.tiers.Tier`."""

    def put(self, key: bytes, groups: int, parts: Sequence[Bytes]) -> bool: ...
    def get(self, key: bytes) -> bytes | None: ...


class Mover:
    """Moves over one pool. The thread starts with the first move. Without a tier every move fails."""

    def __init__(self, pool: Pool, tier: Blobs | None) -> None:
        self._pool = pool
        self._tier = tier
        self._waiting: queue.SimpleQueue[Move | None] = queue.SimpleQueue()
        self._over: queue.SimpleQueue[Moved] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._until_s = math.inf

    def begin(self, move: Move) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="headrace-tier", daemon=True)
            self._thread.start()
        self._waiting.put(move)

    def over(self, *, wait: bool) -> tuple[Moved, ...]:
        """All that is over; with `wait` a moment is given to the first."""
        moved = []
        try:
            if wait:
                moved.append(self._over.get(timeout=WAIT_S))
            while True:
                moved.append(self._over.get_nowait())
        except queue.Empty:
            return tuple(moved)

    def close(self) -> None:
        """Waits for all moves, `CLOSE_S` at most."""
        if self._thread is not None:
            self._until_s = time.perf_counter() + CLOSE_S
            self._waiting.put(None)
            self._thread.join()

    def _serve(self) -> None:
        while (move := self._waiting.get()) is not None:
            begin = time.perf_counter()
            if begin > self._until_s:
                continue
            try:
                done = self._load(move) if move.load else self._save(move)
            except Exception:
                _log.exception("a block could not be moved")
                done = False
            self._over.put(Moved(move.key, move.load, done, time.perf_counter() - begin))

    def _save(self, move: Move) -> bool:
        there = [(g, b) for g, b in enumerate(move.blocks) if b >= 0]
        groups = sum(1 << g for g, _ in there)
        return self._tier is not None and self._tier.put(move.key, groups, [self._pool.read(b) for _, b in there])

    def _load(self, move: Move) -> bool:
        content = None if self._tier is None else self._tier.get(move.key)
        blocks = [b for b in move.blocks if b >= 0]
        size = self._pool.shape.block_bytes
        if content is None or len(content) != len(blocks) * size:
            return False
        for i, b in enumerate(blocks):
            self._pool.write(b, memoryview(content)[i * size : (i + 1) * size])
        return True
