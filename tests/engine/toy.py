"""A toy model that is exact: hashes of ints instead of attention, with a KV cache that really is read through blocks.

Layer g stores for each position a hash of token, position and what the layer below read; it reads all that it stored
within its window. So the next token depends on every earlier one, and a wrong, stale, foreign or missing block changes
it or is caught. `naive` computes the same without blocks, rows or steps: it is the definition.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.cache.blocks import Blocks
from headrace.execute.plan import Admission, Move, Moved, Plan, Result, Row, RowResult, TokenLogprob, Want
from headrace.params import SamplingParams
from headrace.scheduler.messages import Delta, Submit, Timings
from headrace.scheduler.scheduler import Scheduler
from headrace.scheduler.windows import SINKS

PIECES = ("a", "b", "c", "ab", "", "ca", "bb", "d", "e", "ad", "f")
VOCAB = len(PIECES)
POISON = 666
"""A request with this seed has logits that are not finite once it has answered two tokens."""

Windows = tuple[int | None, ...]


def store(layer: int, token: int, position: int, below: int) -> int:
    return hash((layer, token, position, below))


def read(entries: Sequence[int]) -> int:
    return hash(tuple(entries))


def choose(top: int, admission: Admission, answer: Sequence[int]) -> int:
    """The sampler: by (seed, choice, output index), with bias, min_tokens and counts of what was answered."""
    params = admission.params
    key: tuple[object, ...] = (top,)
    if params.temperature:
        key += (params.seed, admission.choice, len(answer))
    if params.frequency_penalty:
        key += (tuple(sorted(Counter(answer).items())),)
    banned = admission.eos if len(answer) < params.min_tokens else frozenset()
    legal = [t for t in range(VOCAB) if t not in banned and params.logit_bias.get(t, 0) > -100]
    return legal[hash(key) % len(legal)]


def logprob(top: int, token: int) -> TokenLogprob:
    return TokenLogprob(token, -(hash((top, token)) % 1000) / 100, 1)


class Letters:
    """The contract of `tokenize.stream.TextStream`, by searching the whole text at every token."""

    def __init__(self, params: SamplingParams) -> None:
        self.stop = params.stop
        self.min_tokens = params.min_tokens
        self.include = params.include_stop_str_in_output
        self.stopped: str | None = None
        self.text = ""
        self.shown = 0
        self.tokens = 0

    def feed(self, token: int) -> tuple[str, str]:
        assert self.stopped is None, "fed after a stop"
        before = len(self.text)
        self.text += PIECES[token]
        self.tokens += 1
        end = len(self.text)
        held = max((k for s in self.stop for k in range(len(s)) if self.text.endswith(s[:k])), default=0)
        if self.tokens >= self.min_tokens:
            found = [(i, s) for s in self.stop if (i := self.text.find(s, max(0, before - len(s) + 1))) >= 0]
            if found:
                at, self.stopped = min(found)
                end, held = at + len(self.stopped) * self.include, 0
        piece, text = self.text[before:end], self.text[self.shown : max(self.shown, end - held)]
        self.shown += len(text)
        return piece, text

    def finish(self) -> str:
        assert self.stopped is None
        return self.text[self.shown :]


@dataclass
class Answer:
    """All that one choice's deltas add up to."""

    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    embedding: tuple[float, ...] = ()
    finish: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def add(self, delta: Delta) -> None:
        assert self.finish is None, "a delta after the last one"
        assert len(delta.pieces) == len(delta.tokens)
        self.tokens += delta.tokens
        self.pieces += delta.pieces
        self.text += delta.text
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        assert not delta.embedding or delta.finish == "length", "a vector before the end"
        self.embedding = delta.embedding
        self.finish, self.stop_reason, self.error = delta.finish, delta.stop_reason, delta.error
        if delta.timings is not None:
            t = delta.timings
            assert delta.finish is not None
            assert 0 <= t.queued_s <= t.total_s
            assert not t.first_token_s or t.queued_s <= t.first_token_s <= t.total_s


def vector(tops: Sequence[int]) -> tuple[float, ...]:
    """What some tokens' hidden states are pooled to."""
    return (float(sum(tops) % 2**50),)


def seen_of(text: Sequence[int], overflow: str, size: int) -> list[int]:
    """What of a text the token after it is chosen from, in windows of `size`: every half window another half is left
    out, until something fits."""
    sinks = SINKS if overflow == "sinks" else 0
    first, rest = list(text[:sinks]), list(text[sinks:])
    while len(first) + len(rest) >= size:
        rest = rest[size // 2 :]
    return first + rest


def top_of(text: Sequence[int], windows: Windows) -> int:
    """The model alone, over a whole text."""
    kv: list[list[int]] = [[] for _ in windows]
    top = 0
    for position, token in enumerate(text):
        top = 0
        for g, window in enumerate(windows):
            kv[g].append(store(g, token, position, top))
            top = read(kv[g][-window:] if window else kv[g])
    return top


def naive(
    prompt: Sequence[int],
    params: SamplingParams,
    choice: int,
    windows: Windows,
    eos: frozenset[int],
    most: int,
    size: int = 0,
) -> Answer:
    """One choice alone, token by token; `most` is the longest prompt plus answer, `size` that of overflow's windows."""
    answer, text = Answer(), Letters(params)
    own = frozenset() if params.ignore_eos else eos
    ends = own | frozenset(params.stop_token_ids)
    admission = Admission(0, choice, params, tuple(prompt), len(prompt), ends)
    kv: list[list[int]] = [[] for _ in windows]
    tokens, top = list(prompt), 0
    tops = []
    if params.windowed:
        limit = len(prompt) + (most if params.max_tokens is None else params.max_tokens)
    else:
        limit = most if params.max_tokens is None else min(most, len(prompt) + params.max_tokens)
    for position in range(limit):
        token = tokens[position]
        if position < len(prompt) and params.prompt_logprobs is not None and choice == 0:
            answer.prompt_logprobs.append(logprob(top, token) if position else None)
        top = 0
        for g, window in enumerate(windows):
            kv[g].append(store(g, token, position, top))
            top = read(kv[g][-window:] if window else kv[g])
        tops.append(top)
        if params.windowed and position + 1 >= size:
            top = top_of(seen_of(tokens[: position + 1], params.overflow, size), windows)
        if position < len(prompt) - 1:
            continue
        if len(tokens) >= limit:
            break
        new = choose(top, admission, tokens[len(prompt) :])
        tokens.append(new)
        answer.tokens.append(new)
        if params.logprobs is not None:
            answer.logprobs.append(logprob(top, new))
        if new in ends and len(answer.tokens) > params.min_tokens:
            answer.pieces.append("")
            answer.finish, answer.stop_reason = "stop", None if new in own else new
            break
        piece, shown = text.feed(new)
        answer.pieces.append(piece)
        answer.text += shown
        if text.stopped is not None:
            answer.finish, answer.stop_reason = "stop", text.stopped
            return answer
    answer.finish = answer.finish or "length"
    if params.pooling is not None:
        answer.embedding = vector(tops if params.pooling == "mean" else tops[-1:])
    answer.text += text.finish()
    return answer


@dataclass
class _State:
    """What an executor keeps of one request."""

    admission: Admission
    tables: list[list[int]]
    tokens: list[int]
    stored: int | None = None
    foreign: int = 0
    """Its first tokens, which lie in blocks that others have computed."""
    top: int = 0
    pooled: list[int] = field(default_factory=list)
    """Hidden states so far, of a request with `pooling`."""

    @property
    def view(self) -> tuple[int, ...]:
        """What its rows compute of what was admitted."""
        a = self.admission
        sinks = SINKS if a.params.overflow == "sinks" and a.left_out else 0
        return a.tokens[:sinks] + a.tokens[sinks + a.left_out :]


class ToyTier:
    """Keeps contents of blocks, or loses them."""

    def __init__(self) -> None:
        self.kept: dict[bytes, dict[int, Any]] = {}

    def groups(self, key: bytes) -> int:
        return sum(1 << g for g in self.kept.get(key, ()))

    def put(self, key: bytes, groups: int, parts: Sequence[Any]) -> bool:
        raise NotImplementedError

    def get(self, key: bytes) -> bytes | None:
        raise NotImplementedError


class Toy:
    """An executor. Whatever a scheduler could get wrong is a failed assertion or another token.

    Moves to and from `tier` take some steps; some of them fail.
    """

    def __init__(
        self, blocks: int, block: int, windows: Windows, tier: ToyTier | None = None, rng: random.Random | None = None
    ) -> None:
        self.tier = tier or ToyTier()
        self.rng = rng or random.Random(0)
        self.moving: list[Move] = []
        self.kv: list[list[tuple[int, int, int] | None]] = [[None] * block for _ in range(blocks)]
        self.block = block
        self.windows = windows
        self.states: dict[int, _State] = {}
        self.closed = False
        self.fresh: list[int] = []
        self.recycled = 0
        """Blocks that held something when they were handed out."""

    def run(self, plan: Plan, masks: object = None) -> Result:
        assert not self.closed
        for request in plan.released:
            del self.states[request]
        for a in plan.admitted:
            assert a.request not in self.states
            self.states[a.request] = _State(a, [[] for _ in self.windows], list(a.tokens))
        assert len({row.request for row in plan.rows}) == len(plan.rows)
        for row in plan.rows:
            self._append_blocks(self.states[row.request], row)
        moving = {b for move in self.moving for b in move.blocks if b >= 0}
        assert not moving & set(self.fresh), "a block is handed out while it moves"
        self.recycled += sum(self.kv[b][0] is not None for b in self.fresh)
        for b in self.fresh:
            self.kv[b] = [None] * self.block
        self.fresh.clear()
        results = tuple(self._run_row(self.states[row.request], row) for row in plan.rows)
        return Result(results, self._move(plan))

    def _move(self, plan: Plan) -> tuple[Moved, ...]:
        self.moving += plan.moves
        assert self.moving or not plan.waits, "it waits for nothing"
        count = self.rng.randint(1 if plan.waits else 0, len(self.moving))
        over, self.moving = self.moving[:count], self.moving[count:]
        return tuple(Moved(move.key, move.load, self._moved(move), 0.0) for move in over)

    def _moved(self, move: Move) -> bool:
        if self.rng.random() < 0.1:
            self.tier.kept.pop(move.key, None)
            return False
        there = {g: b for g, b in enumerate(move.blocks) if b >= 0}
        if not move.load:
            self.tier.kept[move.key] = {g: list(self.kv[b]) for g, b in there.items()}
        elif self.tier.kept.get(move.key, {}).keys() != there.keys():
            return False
        else:
            for g, b in there.items():
                self.kv[b] = list(self.tier.kept[move.key][g])
        return True

    def close(self) -> None:
        self.closed = True

    def _append_blocks(self, state: _State, row: Row) -> None:
        have = len(state.tables[0]) * self.block
        if row.shared:
            assert state.stored is None or state.stored == have, "shared blocks after one that is not full"
            state.stored = state.foreign = have + row.shared * self.block
        state.stored = state.stored or 0
        if row.copied:
            assert state.stored % self.block == 0 and 0 < row.start - state.stored < self.block
            for source, ids in zip(row.copied, row.blocks, strict=True):
                assert self.kv[source][row.start - state.stored - 1] is not None, "a copy of nothing"
                self.kv[ids[row.shared]] = list(self.kv[source])
            state.stored = row.start
        assert row.start <= state.stored, "a gap"
        assert len(row.blocks) == len(self.windows)
        for table, ids in zip(state.tables, row.blocks, strict=True):
            for i, b in enumerate(ids):
                assert b >= 0 or i < row.shared
                if i >= row.shared + bool(row.copied):
                    self.fresh.append(b)
            table += ids

    def _run_row(self, state: _State, row: Row) -> RowResult:
        known = len(row.tokens) - row.drafts
        a, view = state.admission, state.view
        told = view[row.start : row.start + known]
        assert row.tokens and row.tokens[: len(told)] == told, "not the tokens that were admitted"
        if (new_from := len(view) - row.start) < len(row.tokens):
            state.tokens[max(row.start + a.left_out, len(a.tokens)) :] = row.tokens[max(0, new_from) :]
        tops, before = [], state.top
        for position, token in enumerate(row.tokens, row.start):
            tops.append(self._compute(state, position, token))
        state.top, state.stored = tops[-1], row.start + len(row.tokens)
        if a.params.pooling is not None:
            assert row.want in (Want.NOTHING, Want.HIDDEN) and not row.drafts
            assert a.params.pooling == "last" or row.start == len(state.pooled), "a hidden state is missing"
            state.pooled += tops
            pooled = state.pooled if a.params.pooling == "mean" else tops[-1:]
            return RowResult(embedding=vector(pooled)) if row.want is Want.HIDDEN else RowResult()
        prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        if row.want & Want.PROMPT:
            pairs = zip([before, *tops], row.tokens, strict=False)
            prompt_logprobs = tuple(logprob(top, t) if i else None for i, (top, t) in enumerate(pairs, row.start))
        if not row.want & Want.TOKEN:
            return RowResult(prompt_logprobs=prompt_logprobs)
        start = a.left_out + row.start
        assert start + known >= len(a.tokens), "a token is wanted before the end of the known ones"
        if a.params.seed == POISON and start + known >= a.prompt + 2:
            return RowResult(error="the logits are not finite")
        ends = range(start + known, start + len(row.tokens) + 1)
        new = tuple(
            choose(top, a, state.tokens[a.prompt : end]) for top, end in zip(tops[known - 1 :], ends, strict=True)
        )
        logprobs = tuple(logprob(top, t) for top, t in zip(tops[known - 1 :], new, strict=True))
        return RowResult(new, logprobs if a.params.logprobs is not None else (), prompt_logprobs)

    def _compute(self, state: _State, position: int, token: int) -> int:
        below = 0
        assert position >= state.foreign, "writing into what is not its own"
        for g, window in enumerate(self.windows):
            table = state.tables[g]
            b = table[position // self.block]
            self.kv[b][position % self.block] = (g, position, store(g, token, position, below))
            entries = []
            for q in range(0 if window is None else max(0, position - window + 1), position + 1):
                b = table[q // self.block]
                assert b >= 0, "reading outside of the window"
                entry = self.kv[b][q % self.block]
                assert entry is not None and entry[:2] == (g, q), f"block {b} does not hold position {q} of group {g}"
                entries.append(entry[2])
            below = read(entries)
        return below


class Rig:
    """A scheduler and a toy, run step by step, invariants checked after each."""

    def __init__(
        self,
        *,
        count: int = 64,
        block: int = 4,
        windows: Windows = (None,),
        budget: int = 16,
        rows: int = 8,
        context: int = 200,
        eos: frozenset[int] = frozenset(),
        reuse: bool = True,
        **more: Any,
    ) -> None:
        self.windows, self.eos = windows, eos
        self.blocks = Blocks(count, windows, block, lasting=reuse)
        self.scheduler = Scheduler(
            self.blocks, budget=budget, rows=rows, context=context, eos=eos, text=Letters, reuse=reuse, **more
        )
        self.most = min(context, self.blocks.most_tokens + 1)
        self.toy = Toy(count, block, windows)
        self.got: dict[tuple[int, int], Answer] = {}
        self.timings: dict[tuple[int, int], Timings] = {}
        self.plans: list[Plan] = []
        self.users = 0

    def submit(self, prompt: Sequence[int], *, salt: str = "", tenant: str = "", **params: Any) -> int:
        """Put a request in; its id. Greedy and without end unless `params` say otherwise."""
        user, self.users = self.users, self.users + 1
        resolved = SamplingParams(**{"temperature": 0, "seed": 0, "cache_salt": salt} | params)
        message = Submit(user, tuple(prompt), resolved, time.monotonic(), tenant)
        self.collect(self.scheduler.submit(message))
        return user

    def abort(self, user: int) -> None:
        self.collect(self.scheduler.abort(user))
        self.scheduler.check()

    def step(self) -> Plan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.plans.append(plan)
            self.collect(self.scheduler.commit(plan, self.toy.run(plan)))
        self.scheduler.check()
        return plan

    def run(self, most: int = 2000) -> Rig:
        """To the end; nothing may be left over."""
        for _ in range(most):
            if self.step() is None:
                break
        else:
            raise AssertionError(f"not done after {most} steps")
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
        assert not self.toy.states, "the executor still keeps somebody"
        return self

    def naive(self, prompt: Sequence[int], choice: int = 0, **params: Any) -> Answer:
        resolved = SamplingParams(**{"temperature": 0, "seed": 0} | params)
        return naive(prompt, resolved, choice, self.windows, self.eos, self.most)

    def collect(self, deltas: list[Delta]) -> None:
        for d in deltas:
            self.got.setdefault((d.request, d.choice), Answer()).add(d)
            if d.timings is not None:
                self.timings[d.request, d.choice] = d.timings
