"""The prefix cache: which kept blocks hold the keys and values of which tokens. Owns the entries; the blocks, their
reference counts and the order in which they are given up are `cache.blocks`'s.

A block's key is a hash of the key before it and of its tokens, so it stands for all tokens from the first on: equal
keys are equal prefixes, and the tree of prefixes (RadixAttention: Zheng et al. 2023, arXiv:2312.07104) is a dictionary
of blocks. The first key, the root, is a hash of all else that the numbers depend on, and of the salt that keeps tenants
apart. A whole block is shared; of a block that agrees only at its beginning, that beginning can be copied.

Layers with a window need only the last blocks of a prefix. Those before are given up on their own, so an entry may lack
blocks of some groups; a prefix is only reused up to where every group has all that is read from there on.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from headrace.cache.blocks import Blocks
from headrace.cache.tiers import Tier
from headrace.execute.plan import Move

CANDIDATES = 32
"""Most blocks that are compared for one that begins with the right tokens."""


MOVES = 16
"""Most entries that are on their way to a tier at a time, and from it."""


@dataclass(slots=True, eq=False)
class Entry:
    """The contents of one position // block of one prefix."""

    key: bytes
    parent: bytes
    index: int
    tokens: tuple[int, ...]
    blocks: list[int]
    """Per group; -1 where there is none."""
    sound: bool
    """Did logits that depend on it prove finite? Then so is every number in it."""


@dataclass(frozen=True, slots=True)
class Part:
    """A block whose first tokens are the right ones."""

    blocks: tuple[int, ...]
    tokens: int


class PrefixCache:
    """Entries over `blocks`, whose kept ones are all its own. `facts` is all that the numbers depend on, but tokens."""

    def __init__(self, blocks: Blocks, facts: bytes = b"", tier: Tier | None = None) -> None:
        """What is given up goes to `tier`, where there is one."""
        self._blocks = blocks
        self._tier = tier
        self._leaving: dict[bytes, list[int]] = {}
        self._arriving: dict[bytes, Entry] = {}
        self._facts = facts
        self._entries: dict[bytes, Entry] = {}
        self._of_block: dict[int, tuple[Entry, int]] = {}
        self._beginning: dict[tuple[bytes, int], dict[bytes, Entry]] = {}
        self._pinned: list[int] = []
        blocks.forget = self._forget

    def __len__(self) -> int:
        return len(self._entries)

    def root(self, salt: str) -> bytes:
        """The key before the first block."""
        return blake2b(salt.encode(), key=blake2b(self._facts).digest(), digest_size=32).digest()

    def extend(self, keys: list[bytes], root: bytes, tokens: Sequence[int]) -> None:
        """Append the keys of all whole blocks of `tokens` that `keys` lacks."""
        block = self._blocks.block
        for start in range(len(keys) * block, len(tokens) - block + 1, block):
            keys.append(_key(keys[-1] if keys else root, tokens[start : start + block]))

    def match(self, keys: Sequence[bytes], start: int = 0) -> int:
        """How many of the first blocks of `keys` can be reused, where the first `start` are there already; 0 or more
        than `start`."""
        blocks = self._blocks
        groups = range(len(blocks.windows))
        since = [start] * len(groups)  # from which block on a group has all, up to the one at hand
        best = 0
        for index in range(start, len(keys)):
            entry = self._entries.get(keys[index])
            for g in groups:
                if entry is None or entry.blocks[g] < 0:
                    since[g] = index + 1
            if any(since[g] > start and blocks.windows[g] is None for g in groups):
                break  # a group that reads everything lacks something
            query = (index + 1) * blocks.block
            if all(since[g] <= start or since[g] <= blocks.read_from(g, query) for g in groups):
                best = index + 1
        return best

    def held(self, keys: Sequence[bytes], count: int) -> int:
        """Of the blocks that a prefix of `count` blocks would reuse, how many somebody holds just now."""
        blocks = self._blocks
        firsts = [blocks.read_from(g, count * blocks.block) for g in range(len(blocks.windows))]
        return sum(
            blocks.shared(self._entries[key].blocks[g]) for g, first in enumerate(firsts) for key in keys[first:count]
        )

    def take(self, request: int, keys: Sequence[bytes], count: int, priority: int = 0) -> None:
        """Lengthen the request's table to the first `count` blocks of `keys`, as `match` found them."""
        blocks = self._blocks
        start = blocks.length(request)
        more = []
        for g in range(len(blocks.windows)):
            first = blocks.read_from(g, count * blocks.block)
            new = enumerate(keys[start:count], start)
            more.append([self._entries[key].blocks[g] if i >= first else -1 for i, key in new])
        blocks.adopt(request, more, priority)

    def part(self, parent: bytes, tokens: Sequence[int]) -> Part | None:
        """The block after `parent` that has the most of its first tokens in common with `tokens`; sound ones only."""
        if not tokens:
            return None
        found, most = None, 0
        last = reversed(self._beginning.get((parent, tokens[0]), {}).values())
        for entry, _ in zip(last, range(CANDIDATES), strict=False):
            if entry.sound and min(entry.blocks) >= 0 and (same := _common(entry.tokens, tokens)) > most:
                found, most = entry, same
        return None if found is None else Part(tuple(found.blocks), most)

    def put(
        self,
        parent: bytes,
        key: bytes | None,
        index: int,
        tokens: Sequence[int],
        held: Sequence[int],
        priority: int,
        *,
        sound: bool,
    ) -> None:
        """Keep the blocks `held` (per group; -1: none) of a request that has stored `tokens` in them, all of a block or
        its first. What an entry has already is not replaced."""
        blocks = self._blocks
        key = key or _key(parent, tokens)
        entry = self._entries.get(key)
        if entry is None:
            entry = Entry(key, parent, index, tuple(tokens), [-1] * len(held), sound=sound)
            self._add(entry)
        entry.sound |= sound
        for g, b in enumerate(held):
            if entry.blocks[g] < 0 <= b and b not in self._of_block:
                entry.blocks[g] = b
                self._of_block[b] = entry, g
                blocks.keep(b, priority)
        if max(entry.blocks) < 0:
            self._remove(entry)

    def prove(self, keys: Sequence[bytes]) -> None:
        """Logits that depend on these blocks are finite."""
        for key in keys:
            if entry := self._entries.get(key):
                entry.sound = True

    def pin(self, keys: Sequence[bytes]) -> int:
        """Never give up what is there of these blocks, as far as a prefix of all of them needs it. How many blocks of
        the pool that takes."""
        blocks, known = self._blocks, [self._entries[key] for key in keys if key in self._entries]
        firsts = [blocks.read_from(g, len(known) * blocks.block) for g in range(len(blocks.windows))]
        pinned = [e.blocks[g] for g, first in enumerate(firsts) for e in known[first:] if e.blocks[g] >= 0]
        self._blocks.pin(pinned)
        self._pinned += pinned
        self._blocks.reserved = len(set(self._pinned))
        return len(pinned)

    # Tiers

    @property
    def moving(self) -> int:
        """Entries on their way to the tier or from it."""
        return len(self._leaving) + len(self._arriving)

    def arriving(self, key: bytes) -> bool:
        return key in self._arriving

    def save_next(self, most: int) -> list[Move]:
        """Entries to put on the tier now, so that the next `most` blocks can be taken without a loss."""
        moves: list[Move] = []
        if self._tier is not None:
            for b in self._blocks.next_idle(most):
                if len(self._leaving) >= MOVES:
                    break
                moves += self._save(self._of_block[b][0])
        return moves

    def save_all(self) -> list[Move]:
        """Everything that is worth it, at the end; what comes first of a prefix goes first."""
        entries = sorted(self._entries.values(), key=lambda entry: entry.index)
        return [move for entry in entries for move in self._save(entry)]

    def _save(self, entry: Entry) -> list[Move]:
        groups = sum(1 << g for g, b in enumerate(entry.blocks) if b >= 0)
        if self._tier is None or not entry.sound or len(entry.tokens) < self._blocks.block:
            return []
        if entry.key in self._leaving or groups & ~self._tier.groups(entry.key) == 0:
            return []
        held = [b for b in entry.blocks if b >= 0]
        self._blocks.pin(held)
        self._leaving[entry.key] = held
        return [Move(entry.key, tuple(entry.blocks), load=False)]

    def load(self, keys: Sequence[bytes], start: int, root: bytes, tokens: Sequence[int], priority: int) -> list[Move]:
        """Fetch what the tier has of a prefix from block `start` on, as far as there is room. It arrives later."""
        block, moves = self._blocks.block, list[Move]()
        for index in range(start, len(keys)):
            key = keys[index]
            groups = 0 if self._tier is None or key in self._entries else self._tier.groups(key)
            wanted = groups.bit_count()
            if not wanted or key in self._arriving or len(self._arriving) >= MOVES or self._blocks.free <= wanted:
                break
            held = [self._blocks.seize(priority) if groups >> g & 1 else -1 for g in range(len(self._blocks.windows))]
            part = tuple(tokens[index * block : (index + 1) * block])
            entry = Entry(key, keys[index - 1] if index else root, index, part, held, sound=True)
            self._arriving[key] = entry
            self._of_block.update((b, (entry, g)) for g, b in enumerate(held) if b >= 0)
            moves.append(Move(key, tuple(held), load=True))
        return moves

    def moved(self, key: bytes, *, load: bool, done: bool) -> None:
        """A move is over."""
        if not load:
            self._blocks.unpin(self._leaving.pop(key), oldest=True)
            return
        entry = self._arriving.pop(key)
        held = [b for b in entry.blocks if b >= 0]
        if done and key not in self._entries:
            self._add(entry)
            self._blocks.unpin(held)
            return
        for b in held:
            del self._of_block[b]
            self._blocks.discard(b)

    def _add(self, entry: Entry) -> None:
        self._entries[entry.key] = entry
        self._beginning.setdefault((entry.parent, entry.tokens[0]), {})[entry.key] = entry

    def _forget(self, b: int) -> None:
        entry, g = self._of_block.pop(b)
        entry.blocks[g] = -1
        if max(entry.blocks) < 0:
            self._remove(entry)

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.key]
        place = (entry.parent, entry.tokens[0])
        del self._beginning[place][entry.key]
        if not self._beginning[place]:
            del self._beginning[place]

    def check(self, spans: dict[int, tuple[int, int]]) -> None:
        """Prove what must hold between steps, of the blocks too (`Blocks.check`), or raise AssertionError."""
        places = {b: (g, entry.index) for b, (entry, g) in self._of_block.items()}
        moving = [b for held in self._leaving.values() for b in held]
        moving += [b for entry in self._arriving.values() for b in entry.blocks if b >= 0]
        self._blocks.check(spans, places, [*self._pinned, *moving])
        for key, entry in self._entries.items():
            assert max(entry.blocks) >= 0, "an entry without blocks"
            assert all(b < 0 or self._of_block.get(b) == (entry, g) for g, b in enumerate(entry.blocks)), (
                "a block is astray"
            )
            assert key == entry.key == _key(entry.parent, entry.tokens), "a key is not that of its tokens"
            alike = self._beginning.get((entry.parent, entry.tokens[0]), {})
            assert alike.get(key) is entry, "an entry cannot be found"
        assert all(self._beginning.values()), "an empty list of entries"
        everything = [*self._entries.values(), *self._arriving.values()]
        assert sum(b >= 0 for e in everything for b in e.blocks) == len(self._of_block), "a block is lost"
        assert sum(map(len, self._beginning.values())) == len(self._entries), "an entry is lost"


def _key(parent: bytes, tokens: Sequence[int]) -> bytes:
    return blake2b(array("i", tokens).tobytes(), key=parent, digest_size=32).digest()


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many of the first are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
