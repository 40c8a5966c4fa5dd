"""Who computes what in each step. Owns the requests while they live; decides over ints and knows no arrays.

`plan` makes a frozen plan, an executor runs it, `commit` takes its result in. There are no phases: a row is "these
tokens, from here". Long prompts are computed in chunks beside the answers of others, under one budget of tokens per
step (Agrawal et al. 2023, Sarathi, arXiv:2308.16369). Where the pool is full the latest loses its blocks and is
computed anew later. In which order requests stand is the business of `turns`, when they may join that of `policy`; what
they need not compute, that of `reuse`; which tokens of a long text they see, that of `windows`; which blocks, that of
`cache.blocks`.

Not safe for threads: one thread calls everything but `stats`.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from headrace.cache.blocks import Blocks
from headrace.cache.radix import PrefixCache
from headrace.constrain.constraint import Constraint
from headrace.constrain.masks import Asked
from headrace.execute.plan import Admission, Plan, Result, Row, RowResult, TokenLogprob, Want
from headrace.params import SamplingParams
from headrace.scheduler.messages import Delta, Submit, Timings
from headrace.scheduler.pace import Pace
from headrace.scheduler.policy import Continuous, Policy
from headrace.scheduler.rate import Rate
from headrace.scheduler.request import Place, Request, Text
from headrace.scheduler.reuse import Reuse
from headrace.scheduler.turns import FairShare, Turns
from headrace.scheduler.windows import LEAST, SINKS, Windows

_RANK = attrgetter("rank")
_AHEAD = 4
"""For so many steps' tokens there are blocks that can be taken without a loss, where there is a tier."""
_WANTS = (Want.NOTHING, Want.TOKEN, Want.PROMPT, Want.BOTH, Want.HIDDEN)


@dataclass(frozen=True, slots=True)
class Stats:
    """Gauges, and counters since the start."""

    running: int
    """Choices that were admitted: they hold blocks, or wait a step for some that another one computes."""
    waiting: int
    """Choices that wait for their turn."""
    blocks_used: int
    blocks_total: int
    steps: int
    tokens_in: int
    """Prompt tokens of the requests that were begun, each prompt once."""
    tokens_out: int
    preemptions: int
    aborts: int
    """Choices that were aborted."""
    blocks_idle: int
    """Blocks that only the prefix cache holds; they are free for whoever needs them."""
    prefix_asked: int
    """Prompt tokens of all choices that were begun."""
    prefix_hits: int
    """How many of those were not computed, because the prefix cache had them."""
    places: int
    """Places for tokens in all blocks that were used, summed over all steps. However many requests share a block, it
    counts once; idle blocks are free and do not count. 1 - places_filled / places is the share of memory that paging
    wastes: what was allocated and held nothing."""
    places_filled: int
    """How many of those held a token when the step was done."""
    tier_saves: int
    """Cached blocks (of all groups together) that were put on a tier."""
    tier_loads: int
    """Those that came back."""
    waiting_tokens: int
    """Tokens of those that wait: prompts, and the answers of those that were preempted. Choices share their prompt."""
    begin_rate: float
    """Choices per second that left the queue, over the last minute."""
    begin_token_rate: float
    """Their tokens per second, as `waiting_tokens` counts them."""
    refused: int = 0
    """Choices that were refused because the queue was full (`engine.gate`)."""


class Scheduler:
    """Plans steps of at most `budget` tokens and `rows` requests over `blocks`; no sequence grows past `context`.

    Texts that may be longer go on in windows of `window` tokens; by default of what fits now.

    `eos` are the model's end tokens; `text` makes the detokenizer of one choice, `constraint` what it must be.
    `prefix` is the prefix cache over `blocks`; where `reuse` is off only the choices of one request share in it.
    """

    def __init__(
        self,
        blocks: Blocks,
        *,
        budget: int,
        rows: int,
        context: int,
        eos: frozenset[int],
        text: Callable[[SamplingParams], Text],
        constraint: Callable[[SamplingParams], Constraint | None] | None = None,
        policy: Policy | None = None,
        turns: Turns | None = None,
        prefix: PrefixCache | None = None,
        reuse: bool = True,
        pace: Pace | None = None,
        window: int | None = None,
    ) -> None:
        self.blocks = blocks
        self.prefix = PrefixCache(blocks) if prefix is None else prefix
        self._shares = reuse
        self.pace = pace
        self._reuse = Reuse(self.prefix, blocks, pace)
        self._begun_s = 0.0
        self.budget = budget
        self.rows = rows
        self.policy: Policy = policy or Continuous()
        self.turns: Turns = turns or FairShare()
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self._context = context
        self._window = min(context, blocks.most_tokens) if window is None else window
        self._eos = eos
        self._text = text
        self._constraint = constraint or (lambda params: None)
        self._users: dict[int, list[Request]] = {}
        self._by_id: dict[int, Request] = {}
        self._released: list[int] = []
        self._rows: dict[int, Row] = {}
        self._left = 0
        self._next_id = self._next_order = 0
        self._steps = self._tokens_in = self._tokens_out = self._preemptions = self._aborts = 0
        self._waiting_tokens = 0
        self._rate = Rate()
        self._prefix_asked = self._prefix_hits = self._places = self._places_filled = 0

    def submit(self, message: Submit) -> list[Delta]:
        """Put a request into the queue. What admission should have refused ends at once with an error."""
        if message.id in self._users:
            raise ValueError(f"request {message.id} is already here")
        prompt, n = len(message.prompt), message.params.n
        room = self.blocks.most_tokens
        limit = min(self._context, room + 1)  # a last token is never computed, so needs no place
        windows = _windows(message.params, self._window)
        most = min(limit, room) if message.params.max_tokens == 0 else limit - 1
        if prompt == 0 or (prompt > most if windows is None else not LEAST <= windows.size <= room):
            why = f"a prompt of {prompt} tokens cannot be served: 1 to {most} fit into context and pool"
            return [Delta(message.id, choice, finish="error", error=why) for choice in range(n)]
        family = [self._make(message, choice, limit, windows) for choice in range(n)]
        self._next_id += n
        self._next_order += 1
        self._by_id.update((request.id, request) for request in family)
        self._users[message.id] = list(family)
        for request in family:
            self._enter(request, Place.WAITING)
        return []

    def abort(self, user: int) -> list[Delta]:
        """End every live choice of a user's request, between steps. Unknown ids are ignored."""
        now = time.monotonic()
        family = list(self._users.get(user, ()))
        self._aborts += len(family)
        return [self._last(request, "abort", None, now) for request in family]

    def plan(self) -> Plan | None:
        """The next step; None when nothing is to be done. A plan without rows only drops the executor's state.

        Whoever has one token to compute goes first, so that answers keep their pace; the rest of the budget is for
        chunks of longer rows, in order; what is left then is for newcomers.
        """
        now = time.monotonic()
        self._rows, self._left = {}, self.budget
        self._reuse.begin_step()
        longer = []
        for request in self.running:  # a preemption takes from its end, which a loop over a list allows
            if len(request.tokens) - request.computed == 1:
                self._give_row(request)
            else:
                longer.append(request)
        if self.pace is not None:
            self._left = min(self._left, self.pace.others(len(self._rows)))
        for request in longer:
            if request.place is Place.RUNNING and self._reuse.catch_up(request):
                self._give_row(request)
        if self.waiting:
            self._admit_some(now)
        moves = self._reuse.moves(_AHEAD * self.budget // self.blocks.block * len(self.blocks.windows))
        if not self._rows and not self._released and not self._reuse.moving:
            return None
        self._begun_s = time.monotonic()
        released, self._released = self._released, []
        waits = not self._rows and self._reuse.moving
        return Plan(tuple(self._rows.values()), self._introduce(now), tuple(released), moves, waits)

    def constrained(self, plan: Plan) -> list[Asked]:
        """The rows of a plan whose next tokens may not be any."""
        return [
            Asked(r.id, r.constraint, r.ends, row.tokens[len(row.tokens) - row.drafts :])
            for row in plan.rows
            if row.want & Want.TOKEN and (r := self._by_id[row.request]).constraint is not None
        ]

    def commit(self, plan: Plan, result: Result) -> list[Delta]:
        """Take in what `plan` gave: tokens kept, blocks kept or given back, who is finished."""
        now = time.monotonic()
        self._steps += bool(plan.rows)
        if self.pace is not None and plan.rows:
            answers = sum(len(row.tokens) == 1 for row in plan.rows)
            others = sum(len(row.tokens) for row in plan.rows) - answers
            self.pace.took(answers, others, now - self._begun_s)
        self._count_places(plan)
        deltas: list[Delta] = []
        self._reuse.moved(result.moved)
        for row, got in zip(plan.rows, result.rows, strict=True):
            request = self._by_id[row.request]
            if got.error is not None:
                request.computed -= request.computed % self.blocks.block  # who knows what its last block holds now
                deltas.append(self._last(request, "error", got.error, now))
            else:
                self._take(request, row, got, now, deltas)
        return deltas

    def parting(self) -> Plan | None:
        """The last plan, when all requests have ended: what a tier keeps for the next time."""
        moves = self._reuse.parting()
        return Plan((), moves=moves) if moves else None

    @property
    def retry_s(self) -> float | None:
        """Seconds after which `plan` may find something to do though nothing happens."""
        return self.policy.retry_s if self.waiting else None

    def stats(self) -> Stats:
        """May be called from any thread."""
        begin_rate, begin_token_rate = self._rate.per_second(time.monotonic())
        return Stats(
            running=len(self.running),
            waiting=len(self.waiting),
            blocks_used=self.blocks.used,
            blocks_total=self.blocks.count,
            steps=self._steps,
            tokens_in=self._tokens_in,
            tokens_out=self._tokens_out,
            preemptions=self._preemptions,
            aborts=self._aborts,
            blocks_idle=self.blocks.idle,
            prefix_asked=self._prefix_asked,
            prefix_hits=self._prefix_hits,
            places=self._places,
            places_filled=self._places_filled,
            tier_saves=self._reuse.saves,
            tier_loads=self._reuse.loads,
            waiting_tokens=self._waiting_tokens,
            begin_rate=begin_rate,
            begin_token_rate=begin_token_rate,
        )

    def check(self) -> None:
        """Prove between steps what must hold, or raise AssertionError."""
        everybody = [*self.running, *self.waiting]
        holds = {
            "queue and plan are sorted": all(q == sorted(q, key=_RANK) for q in (self.running, self.waiting)),
            "places are right": all(
                r.place is place
                for q, place in ((self.running, Place.RUNNING), (self.waiting, Place.WAITING))
                for r in q
            ),
            "everybody is somewhere once": sorted(r.id for r in everybody) == sorted(self._by_id),
            "users know their choices": {r.id for u in self._users.values() for r in u} == self._by_id.keys(),
            "nobody idle has computed anything": not any(r.computed or r.known or r.kept for r in self.waiting),
            "everybody running has something to do": all(r.computed < len(r.tokens) for r in self.running),
            "nobody is too long": all(r.length < max(r.limit, r.prompt + 1) for r in everybody),
            "windows hold what they can": all(r.windows is None or len(r.tokens) <= r.windows.size for r in everybody),
            "the queue's tokens are counted": self._waiting_tokens == sum(map(_queued, self.waiting)),
            "whole blocks are kept": all(
                r.kept == (0 if r.left_out else r.computed // self.blocks.block) for r in self.running
            ),
        }
        if broken := [what for what, held in holds.items() if not held]:
            raise AssertionError(f"does not hold: {', '.join(broken)}")
        self.prefix.check({r.id: (r.computed, r.computed) for r in self.running})

    # Planning: who gets a row.

    def _give_row(self, request: Request) -> None:
        """A row of as many tokens as budget and blocks allow; none where that is none."""
        if not self._left or len(self._rows) >= self.rows:
            return
        copied = self._reuse.part(request)
        room = self._room(request)
        skipped = copied.tokens if copied else 0
        start = request.computed + skipped
        count = min(len(request.tokens) - start, room - skipped, self._left)
        if count <= 0:
            return
        end = start + count
        told = request.told
        self.blocks.grow(request.id, end)
        request.told = self.blocks.length(request.id)
        self.blocks.unpin(copied.blocks if copied else ())
        self._left -= count
        self._rows[request.id] = Row(
            request.id,
            start,
            tuple(request.tokens[start:end]),
            self.blocks.table(request.id, told),
            _WANTS[request.ends_known(end) + 2 * request.scores(end) + 4 * request.pools(end)],
            shared=max(0, request.kept - told),
            copied=copied.blocks if copied else (),
        )
        if count > 1:
            self._reuse.computes(request, start, end)

    def _room(self, request: Request) -> int:
        """How many more tokens it can have in the pool, at the cost of later ones where it could have none at all."""
        while not (room := self.blocks.room(request.id, request.computed)):
            victim = self.running[-1]
            if victim is request:
                break  # the others will end or grow at its cost; it keeps what it has
            self._preempt(victim)
        return room

    def _preempt(self, victim: Request) -> None:
        self._preemptions += 1
        victim.preemptions += 1
        if row := self._rows.pop(victim.id, None):
            self._left += len(row.tokens)
        self._leave(victim)
        self._enter(victim, Place.WAITING)

    def _admit_some(self, now: float) -> None:
        seats = max(0, self.rows - len(self.running))
        for request in self.policy.admits(self.waiting, self.running, now)[:seats]:
            if not self._left or not self._fits(request):
                break
            if not request.preemptions:
                self.turns.begins(request)
                self._rate.add(now, _queued(request))
            self._remove(request)
            self.blocks.open(request.id)
            self._enter(request, Place.RUNNING)
            if self._reuse.catch_up(request):
                self._give_row(request)

    def _fits(self, request: Request) -> bool:
        """All of it now, and then a block per KV group for each that runs: else it would soon be preempted again."""
        if not self.running:
            return True
        growth = len(self.running) * len(self.blocks.windows)
        need = self.blocks.need(len(request.tokens)) + growth - self.blocks.free
        return need <= 0 or need <= self._reuse.spared(request)

    def _introduce(self, now: float) -> tuple[Admission, ...]:
        """Those in the plan whom the executor does not know."""
        admitted = []
        for r in [self._by_id[i] for i in self._rows]:
            if r.known:
                continue
            r.known = True
            admitted.append(Admission(r.id, r.choice, r.params, r.whole, r.prompt, r.ends, len(r.left_out)))
            if r.started is None:
                r.started = now
                self._tokens_in += 0 if r.choice else r.prompt
                self._prefix_asked += r.prompt
                r.cached = self._rows[r.id].start
                self._prefix_hits += r.cached
        return tuple(admitted)

    # Committing: what a row gave.

    def _take(self, request: Request, row: Row, got: RowResult, now: float, deltas: list[Delta]) -> None:
        kept = _kept(row, got)
        request.computed = row.start + len(row.tokens) - row.drafts + max(0, len(kept) - 1)
        prompt_logprobs = _news(request, row, got) if row.want & Want.PROMPT else ()
        said = request.hear(kept)
        request.computed = min(request.computed, len(request.tokens))  # what stands behind an end never was
        if said.tokens:
            self._tokens_out += len(said.tokens)
            if request.spoke is None:
                request.spoke = now
                self._reuse.prove(request)
        self._reuse.keep(request)
        if got.embedding:
            self._reuse.prove(request)
        self.blocks.trim(request.id, request.computed)
        if said.finish is None and request.over:
            self._slide(request)
        if said.finish is None and not said.tokens and not prompt_logprobs:
            return
        deltas.append(
            Delta(
                request.user,
                request.choice,
                said.tokens,
                tuple(said.pieces),
                said.text,
                got.logprobs[: len(said.tokens)],
                prompt_logprobs,
                got.embedding,
                said.finish,
                said.reason,
                None,
                None if said.finish is None else self._end(request, now),
                now,
            )
        )

    def _slide(self, request: Request) -> None:
        """Into its next window: it goes on running, but is computed anew."""
        self._reuse.leave(request)
        request.slide()
        self._forget(request)
        self.blocks.open(request.id)

    def _count_places(self, plan: Plan) -> None:
        """Only a request's last block in each group has places that hold nothing: all that are shared are whole."""
        block, by_id = self.blocks.block, self._by_id
        empty = sum(self.blocks.length(r.id) * block - r.computed for r in self.running)
        empty -= sum(row.start + len(row.tokens) - row.drafts - by_id[row.request].computed for row in plan.rows)
        places = self.blocks.used * block
        self._places += places
        self._places_filled += places - empty * len(self.blocks.windows)

    # Coming and going.

    def _make(self, message: Submit, choice: int, most: int, windows: Windows | None) -> Request:
        params, prompt = message.params, len(message.prompt)
        eos = frozenset() if params.ignore_eos else self._eos
        request = Request(
            id=self._next_id + choice,
            user=message.id,
            choice=choice,
            params=params,
            tokens=list(message.prompt),
            prompt=prompt,
            limit=_limit(params, prompt, most, windows),
            eos=eos,
            ends=eos.union(params.stop_token_ids),
            text=self._text(params),
            constraint=self._constraint(params),
            arrived=message.arrived,
            order=self._next_order,
            tenant=message.tenant,
            pin=message.pin,
            root=self.prefix.root(message.params.cache_salt if self._shares else f"{message.id}"),
            unreported=0 if choice or params.prompt_logprobs is None else prompt,
            windows=windows,
        )
        request.rank = self.turns.rank(request)
        return request

    def _enter(self, request: Request, place: Place) -> None:
        request.place = place
        insort(self.running if place is Place.RUNNING else self.waiting, request, key=_RANK)
        if place is Place.WAITING:
            self._waiting_tokens += _queued(request)

    def _remove(self, request: Request) -> None:
        queue = self.running if request.place is Place.RUNNING else self.waiting
        del queue[bisect_left(queue, request.rank, key=_RANK)]
        if request.place is Place.WAITING:
            self._waiting_tokens -= _queued(request)

    def _leave(self, request: Request) -> None:
        """Out of its place; its blocks and what the executor knows of it go."""
        self._remove(request)
        if request.place is Place.RUNNING:
            self._reuse.leave(request)
            self._forget(request)

    def _forget(self, request: Request) -> None:
        """Nothing of it is computed any more."""
        self.blocks.release(request.id)
        if request.known:
            self._released.append(request.id)
        request.known = False
        request.computed = request.kept = request.told = 0

    def _end(self, request: Request, now: float) -> Timings:
        """Forget the request."""
        if request.pin:
            self._reuse.pin(request)
        self._leave(request)
        self.turns.ends(request)
        del self._by_id[request.id]
        family = self._users[request.user]
        family.remove(request)
        if not family:
            del self._users[request.user]
        return request.timings(now)

    def _last(self, request: Request, finish: str, error: str | None, now: float) -> Delta:
        """End a request that nothing more is to come from."""
        timings = self._end(request, now)
        return Delta(request.user, request.choice, text=request.rest(), finish=finish, error=error, timings=timings)


def _queued(request: Request) -> int:
    """What a waiting request adds to the tokens of the queue."""
    return request.answered + (0 if request.choice else request.reads)


def _windows(params: SamplingParams, size: int) -> Windows | None:
    """Of a text that may go on beyond the context, where the request asks for that."""
    sinks = {"sliding": 0, "sinks": SINKS}.get(params.overflow)
    return None if sinks is None else Windows(size, sinks)


def _limit(params: SamplingParams, prompt: int, most: int, windows: Windows | None) -> int:
    """Most tokens of prompt and answer; `most` fit where there are no windows."""
    if params.max_tokens is None:
        return most if windows is None else prompt + most
    return prompt + params.max_tokens if windows else min(most, prompt + params.max_tokens)


def _kept(row: Row, got: RowResult) -> tuple[int, ...]:
    """The target's own tokens up to the first that differs from the draft: exact for any draft."""
    if len(got.tokens) != (1 + row.drafts if row.want & Want.TOKEN else 0):
        raise ValueError(f"a row with {row.drafts} drafts that wants {row.want.name} gave {len(got.tokens)} tokens")
    if not row.drafts:
        return got.tokens
    drafts = row.tokens[-row.drafts :]
    right = next((i for i, draft in enumerate(drafts) if got.tokens[i] != draft), row.drafts)
    return got.tokens[: right + 1]


def _news(request: Request, row: Row, got: RowResult) -> tuple[TokenLogprob | None, ...]:
    """Of the prompt's log-probabilities those that were not reported before a preemption."""
    if len(got.prompt_logprobs) != len(row.tokens):
        raise ValueError(f"a row of {len(row.tokens)} tokens gave {len(got.prompt_logprobs)} prompt logprobs")
    new = len(request.left_out) + row.start + len(row.tokens) - (request.prompt - request.unreported)
    request.unreported -= new
    return got.prompt_logprobs[-new:]
