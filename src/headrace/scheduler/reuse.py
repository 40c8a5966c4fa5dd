"""What requests take from the prefix cache and what they leave there. Owns, for one step, what is being computed, and
what moves to and from the tier; the entries are `cache.radix`'s.

Before a longer row begins a block it takes over all that follows and is cached; where another row of the same plan is
about to compute it, it waits. So requests that arrive together compute what they share once, like the n choices of one
request. A window that left tokens out shares nothing with anybody (`scheduler.windows`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from headrace.cache.blocks import Blocks
from headrace.cache.radix import Part, PrefixCache
from headrace.execute.plan import Move, Moved
from headrace.scheduler.pace import Pace
from headrace.scheduler.request import Request

_LOADS = 15
"""Moves from a tier whose times are remembered."""


class Reuse:
    """`prefix` over `blocks`, as requests use it. `pace` knows how long it takes to compute a token."""

    def __init__(self, prefix: PrefixCache, blocks: Blocks, pace: Pace | None) -> None:
        self._prefix = prefix
        self._blocks = blocks
        self._pace = pace
        self._coming: set[bytes] = set()
        self._moves: list[Move] = []
        self._load_s: deque[float] = deque(maxlen=_LOADS)
        self.saves = self.loads = 0
        """Moves to the tier and from it that came to their end."""

    def begin_step(self) -> None:
        """Nothing is being computed yet."""
        self._coming.clear()

    def moves(self, ahead: int) -> tuple[Move, ...]:
        """Those to begin with this step, so that the next `ahead` blocks can be taken without a loss."""
        moves, self._moves = self._moves + self._prefix.save_next(ahead), []
        return tuple(moves)

    @property
    def moving(self) -> bool:
        """Is anything on its way?"""
        return self._prefix.moving > 0

    def catch_up(self, request: Request) -> bool:
        """Take over what is cached from where it stands. False: another row of this plan computes what comes next."""
        block = self._blocks.block
        if request.computed % block or request.computes_all or request.left_out:
            return True
        keys, have = self._reusable(request), request.computed // block
        if count := self._prefix.match(keys, have):
            self._prefix.take(request.id, keys, count, request.params.priority)
            request.computed, request.kept = count * block, count
            have = count
        if have >= len(keys):
            return True
        if self._loading_pays():
            self._moves += self._prefix.load(keys, have, request.root, request.tokens, request.params.priority)
        return keys[have] not in self._coming and not self._prefix.arriving(keys[have])

    def part(self, request: Request) -> Part | None:
        """The beginning of a cached block that it may copy instead of computing it, at the border of a block. Pinned,
        so that no place is found for the copy where it lies."""
        block, start = self._blocks.block, request.computed
        if start % block or request.computes_all or request.left_out or len(request.tokens) - start == 1:
            return None
        keys, index = self._keys(request), start // block
        parent = keys[index - 1] if index else request.root
        part = self._prefix.part(parent, request.tokens[start : min(start + block, len(request.tokens) - 1)])
        if part is None:
            return None
        self._blocks.pin(part.blocks)
        if self._blocks.room(request.id, start) > 0:
            return part
        self._blocks.unpin(part.blocks)
        return None

    def computes(self, request: Request, start: int, end: int) -> None:
        """A row of this plan: others may wait for what it computes."""
        if not request.left_out:
            block = self._blocks.block
            self._coming.update(self._keys(request)[start // block : end // block])

    def spared(self, request: Request) -> int:
        """Of the blocks that it needs, how many somebody holds just now for the same tokens."""
        if request.computes_all or request.left_out:
            return 0
        keys = self._reusable(request)
        return self._prefix.held(keys, self._prefix.match(keys))

    def keep(self, request: Request) -> None:
        """What it has computed is there for others: its whole blocks, those that a preemption or an end leaves too."""
        block = self._blocks.block
        if request.left_out or request.kept == request.computed // block:
            return
        keys = self._keys(request)
        for index in range(request.kept, request.computed // block):
            self._put(request, index, keys[index])
        request.kept = request.computed // block

    def leave(self, request: Request) -> None:
        """It gives its blocks back: the last, partly filled one is there for others too."""
        if request.computed % self._blocks.block and not request.left_out:
            self._put(request, request.computed // self._blocks.block, None)

    def prove(self, request: Request) -> None:
        """Its logits are finite, and so is all that it has kept."""
        self._prefix.prove(request.keys[: request.kept])

    def pin(self, request: Request) -> None:
        """What it has kept is never given up."""
        self._prefix.pin(request.keys[: request.kept])

    def moved(self, moved: Sequence[Moved]) -> None:
        """These moves are over."""
        for move in moved:
            self._prefix.moved(move.key, load=move.load, done=move.done)
            self.loads += move.load and move.done
            self.saves += not move.load and move.done
            if move.load and move.done:
                self._load_s.append(move.seconds)

    def parting(self) -> tuple[Move, ...]:
        """What a tier keeps for the next time, when all requests have ended."""
        return tuple(self._prefix.save_all())

    def _loading_pays(self) -> bool:
        """Is a block sooner brought from the tier than computed, by the times that both took? At first it is tried."""
        token_s = self._pace.token_s if self._pace is not None else None
        return not self._load_s or token_s is None or median(self._load_s) < token_s * self._blocks.block

    def _keys(self, request: Request) -> list[bytes]:
        """The keys of all its whole blocks."""
        self._prefix.extend(request.keys, request.root, request.tokens)
        return request.keys

    def _reusable(self, request: Request) -> list[bytes]:
        """The keys of those that it need not compute itself: its last token it must, for its logits."""
        return self._keys(request)[: (len(request.tokens) - 1) // self._blocks.block]

    def _put(self, request: Request, index: int, key: bytes | None) -> None:
        block = self._blocks.block
        self._prefix.put(
            request.keys[index - 1] if index else request.root,
            key,
            index,
            request.tokens[index * block : min((index + 1) * block, request.computed)],
            self._blocks.at(request.id, index),
            request.params.priority,
            sound=request.spoke is not None,
        )
