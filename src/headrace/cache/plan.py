"""The memory of one engine, planned before a weight is read: what each part takes, how many blocks the KV pool gets,
what remains; or, where it is too little, what would fit. Pure functions over ints: it asks neither machine nor model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.cache.blocks import Blocks
from headrace.cache.pool import BLOCK
from headrace.errors import OptionError

MEGABYTE = 10**6
RESERVE = 16
"""One part in so many of what is granted stays untouched, where the user has not said how much may be taken."""
SHARE = 2
"""Of what is left then the pool takes one part in so many, where the user has not said how much may be taken."""
MARGIN = (5, 4)
"""So many times the requests that were seen at once are provided for."""
FEWEST_ROWS, MOST_ROWS = 8, 256
"""That past load may propose: rows cost no memory, and more than a few hundred bring no speed."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a model and its options take beside the pool, and what the pool is for; bytes where nothing else is said."""

    process: int
    """The interpreter with all that is loaded into it, and what it will grow by."""
    weights: int
    buffers: int
    """Of a step."""
    block: int
    """One block of the pool."""
    windows: tuple[int | None, ...]
    """Of each group of layers; None: sees everything."""
    context: int
    """Tokens: the longest prompt plus answer, as asked for."""
    trained: int
    """Tokens: what the model was made for."""
    packing: int = 0
    """Pages of the model's file that are in memory beside the loaded weights while the largest is packed: at a first
    start, before the pool is used, and clean, so that the system can drop them."""
    slack: int = 0
    """By how much `process` may be more at the next start; what is advised fits then too."""

    @property
    def fixed(self) -> int:
        """All but the pool."""
        return self.process + self.weights + self.buffers

    def blocks(self, length: int) -> int:
        """What one request of so many tokens needs."""
        return Blocks(1, self.windows).need(length)

    def longest(self, blocks: int) -> int:
        """Tokens of the longest request that so many blocks hold; without end (2^40 blocks) where every group has a
        window."""
        one = Blocks(1, self.windows)
        return bisect_right(range(2**40), blocks, key=lambda index: one.need(index * BLOCK + 1)) * BLOCK


@dataclass(frozen=True, slots=True)
class Demand:
    """What past load asks for."""

    length: int
    """Tokens, prompt and answer: what nearly all requests stay within."""
    at_once: int
    """Requests: what nearly always were not more."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Limits that past load would have needed."""

    blocks: int
    rows: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What goes where."""

    needs: Needs
    granted: int
    """Bytes that the process may hold, by the system's word; 0: it does not say."""
    bound: int | None
    """Bytes that it may hold, by the user's word."""
    blocks: int
    """Of the KV pool."""
    rows: int
    """Most requests in one step."""
    chosen: str
    """Who says how large the pool is: pool_bytes, memory, past load, default."""
    proposal: Proposal | None

    @property
    def pool(self) -> int:
        return self.blocks * self.needs.block

    @property
    def total(self) -> int:
        """What the process will hold once the whole pool was used."""
        return self.needs.fixed + self.pool

    @property
    def first_start(self) -> int:
        """What the process will hold at most while weights are packed for the first time."""
        return self.needs.process + self.needs.weights + self.needs.packing

    @property
    def limit(self) -> int:
        """Bytes that it may hold; 0: nobody says."""
        return self.granted if self.bound is None else self.bound

    @property
    def remains(self) -> int:
        """Of the limit; 0 where there is none."""
        return max(0, self.limit - self.total)

    @property
    def pool_tokens(self) -> int:
        """The longest sequence that the pool holds when it is alone."""
        return self.needs.longest(self.blocks)

    def at_once(self, length: int) -> int:
        """How many requests of so many tokens the pool holds at once."""
        return self.blocks // self.needs.blocks(length)


def propose(needs: Needs, demand: Demand) -> Proposal:
    """Room for as many requests as were seen at once and some more, each as long as nearly all were; never less than
    the one longest request that is allowed."""
    times, of = MARGIN
    wanted = min(MOST_ROWS, -(-demand.at_once * times // of))
    blocks = max(needs.blocks(needs.context), wanted * needs.blocks(min(demand.length, needs.context)))
    return Proposal(blocks, max(FEWEST_ROWS, wanted))


def plan_memory(
    needs: Needs,
    *,
    granted: int,
    bound: int | None,
    pool_bytes: int | None,
    rows: int | None,
    default_rows: int,
    demand: Demand | None = None,
    automatic: bool = False,
) -> MemoryPlan:
    """`granted`: all that the process may hold, 0 where that is not known. `bound`, `pool_bytes` and `rows` are the
    user's, None where they are silent; with `automatic` the proposal out of `demand` then takes their place.

    The whole never exceeds the bound, nor what is granted. OptionError where the model, or one request of its whole
    context, does not fit: it names the option to change and what would fit.
    """
    if bound is not None and 0 < granted < bound:
        raise OptionError(
            f"memory is {_mb(bound)}, but this process may hold {_mb(granted, up=False)}: what it has and what is free "
            "here, or in its control group",
            "memory",
        )
    proposal = None if demand is None else propose(needs, demand)
    used = proposal if automatic else None
    chosen_rows = rows or (used.rows if used else default_rows)
    limit = granted if bound is None else bound
    if pool_bytes is not None:
        blocks, chosen = _asked(needs, pool_bytes, limit, bound), "pool_bytes"
    elif not limit:
        blocks, chosen = used.blocks if used else chosen_rows * needs.blocks(needs.context), "default"
    else:
        left = limit - needs.fixed
        spare = left if bound is not None else left - granted // RESERVE
        one = needs.blocks(needs.context)
        if spare // needs.block < one:
            raise _too_little(needs, limit, bound, spare, one)
        if used is not None:
            blocks, chosen = min(used.blocks, spare // needs.block), "past load"
        elif bound is not None:
            blocks, chosen = min(chosen_rows * one, spare // needs.block), "memory"
        else:
            blocks, chosen = min(chosen_rows * one, max(one, spare // SHARE // needs.block)), "default"
    return MemoryPlan(needs, granted, bound, blocks, chosen_rows, chosen, proposal)


def _asked(needs: Needs, pool_bytes: int, limit: int, bound: int | None) -> int:
    """Blocks of a pool that was asked for."""
    least = len(needs.windows)
    blocks = pool_bytes // needs.block
    if blocks < least:
        raise OptionError(
            f"pool_bytes must be at least {least * needs.block} for this model: a block of {BLOCK} tokens for each of "
            f"its {least} groups of layers",
            "pool_bytes",
        )
    if limit and needs.fixed + blocks * needs.block > limit:
        left = max(0, limit - needs.fixed - needs.slack)
        have = f"{_mb(limit, up=False)} are free here" if bound is None else f"memory is {_mb(limit, up=False)}"
        more = "" if bound is None else f", or memory at least {_mb(needs.fixed + needs.slack + pool_bytes)}"
        raise OptionError(
            f"pool_bytes is {pool_bytes}, but {have}: beside {_parts(needs)} it can be at most {left}{more}",
            "pool_bytes",
        )
    return blocks


def _too_little(needs: Needs, limit: int, bound: int | None, spare: int, one: int) -> OptionError:
    """`spare`: bytes left for the pool, below 0 where even the rest does not fit; `one`: blocks of a whole context."""
    blocks = max(0, spare - needs.slack) // needs.block
    longest = min(needs.longest(blocks), needs.context) if blocks else 0
    kept = 0 if bound is not None else limit // RESERVE

    def free(nbytes: int) -> str:
        """So that so many are left beside what is kept free."""
        nbytes += needs.slack
        return _mb(nbytes if bound is not None else -(-nbytes * RESERVE // (RESERVE - 1)))

    whole = free(needs.fixed + one * needs.block)
    have = f"memory is {_mb(limit, up=False)}" if bound is not None else f"{_mb(limit, up=False)} are free here"
    rest = f" (and {_mb(kept)} kept free)" if kept else ""
    more = f"memory of at least {whole}" if bound is not None else f"at least {whole} free"
    if longest:
        return OptionError(
            f"{have}: beside {_parts(needs)}{rest} that is too little for one request of the context {needs.context}. "
            f"What would fit: context {_fitting(needs, blocks, longest)}; or {more}",
            "context" if bound is None else "memory",
        )
    least = free(needs.fixed + len(needs.windows) * needs.block)
    return OptionError(
        f"{have}: too little for this model with {_parts(needs)}{rest}, whatever the context and rows. It needs at "
        f"least {least} for {BLOCK} tokens, {whole} for one request of the context {needs.context}; a "
        "smaller budget makes the buffers smaller",
        "memory",
    )


def _fitting(needs: Needs, blocks: int, longest: int) -> str:
    """The largest context, and how many shorter requests at once."""
    told = [f"{longest} for one request at a time"]
    shorter = longest // 4 // BLOCK * BLOCK
    if shorter and (count := blocks // needs.blocks(shorter)) > 1:
        told.append(f"{shorter} for {count} at once")
    return ", ".join(told)


def _parts(needs: Needs) -> str:
    parts: Sequence[tuple[str, int]] = [
        ("process", needs.process),
        ("weights", needs.weights),
        ("buffers", needs.buffers),
    ]
    return ", ".join(f"{_mb(nbytes)} of {name}" for name, nbytes in parts)


def _mb(nbytes: int, *, up: bool = True) -> str:
    """In megabytes, so that whoever types them gets enough: rounded up what is needed, down what there is."""
    return f"{-(-nbytes // MEGABYTE) if up else nbytes // MEGABYTE}MB"
