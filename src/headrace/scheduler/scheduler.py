"""Who computes what in each step. Owns the requests while they live; decides over ints and knows no arrays.

`plan` makes a frozen plan, an executor runs it, `commit` takes its result in. There are no phases: a row is "these
tokens, from here". Long prompts are computed in chunks beside the answers of others, under one budget of tokens per
step (Agrawal et al. 2023, Sarathi, arXiv:2308.16369). Where the pool is full the latest loses its blocks and is
computed anew later. Whose turn it is, is the policy's business; which blocks, that of `cache.blocks`.

Not safe for threads: one thread calls everything but `stats`.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from headrace.cache.blocks import Blocks
from headrace.execute.plan import Admission, Plan, Result, Row, RowResult, TokenLogprob, Want
from headrace.params import SamplingParams
from headrace.scheduler.messages import Delta, Submit, Timings
from headrace.scheduler.policy import Continuous, Policy
from headrace.scheduler.request import Place, Request, Text

_RANK = attrgetter("rank")
_WANTS = (Want.NOTHING, Want.TOKEN, Want.PROMPT, Want.BOTH)


@dataclass(frozen=True, slots=True)
class Stats:
    """Gauges, and counters since the start."""

    running: int
    """Choices that hold blocks."""
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


class Scheduler:
    """Plans steps of at most `budget` tokens and `rows` requests over `blocks`; no sequence grows past `context`.

    `eos` are the model's end tokens; `text` makes the detokenizer of one choice. Siblings join their first without
    waiting, so `running` may hold more than `rows`; a plan never does.
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
        policy: Policy | None = None,
    ) -> None:
        self.blocks = blocks
        self.budget = budget
        self.rows = rows
        self.policy: Policy = policy or Continuous()
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self._most = min(context, blocks.most_tokens + 1)  # a last token is never computed, so needs no place
        self._eos = eos
        self._text = text
        self._users: dict[int, list[Request]] = {}
        self._by_id: dict[int, Request] = {}
        self._released: list[int] = []
        self._rows: dict[int, Row] = {}
        self._left = 0
        self._next_id = self._next_order = 0
        self._steps = self._tokens_in = self._tokens_out = self._preemptions = self._aborts = self._parked = 0

    def submit(self, message: Submit) -> list[Delta]:
        """Put a request into the queue. What admission should have refused ends at once with an error."""
        if message.id in self._users:
            raise ValueError(f"request {message.id} is already here")
        prompt, n = len(message.prompt), message.params.n
        most = min(self._most, self.blocks.most_tokens) if message.params.max_tokens == 0 else self._most - 1
        if not 0 < prompt <= most:
            why = f"a prompt of {prompt} tokens cannot be served: 1 to {most} fit into context and pool"
            return [Delta(message.id, choice, finish="error", error=why) for choice in range(n)]
        family = [self._make(message, choice) for choice in range(n)]
        self._next_id += n
        self._next_order += 1
        self._by_id.update((request.id, request) for request in family)
        self._users[message.id] = list(family)
        self._parked += n
        self._lead(family)
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
        longer = []
        for request in self.running:  # a preemption takes from its end, which a loop over a list allows
            if len(request.tokens) - request.computed == 1:
                self._give_row(request)
            else:
                longer.append(request)
        for request in longer:
            if request.place is Place.RUNNING:
                self._give_row(request)
        if self.waiting:
            self._admit_some(now)
        if not self._rows and not self._released:
            return None
        released, self._released = self._released, []
        return Plan(tuple(self._rows.values()), self._introduce(now), tuple(released))

    def commit(self, plan: Plan, result: Result) -> list[Delta]:
        """Take in what `plan` gave: tokens kept, blocks kept or given back, who is finished."""
        now = time.monotonic()
        self._steps += 1
        deltas: list[Delta] = []
        for row, got in zip(plan.rows, result.rows, strict=True):
            request = self._by_id[row.request]
            if got.error is not None:
                deltas.append(self._last(request, "error", got.error, now))
            else:
                self._take(request, row, got, now, deltas)
        return deltas

    def stats(self) -> Stats:
        """May be called from any thread."""
        return Stats(
            running=len(self.running),
            waiting=len(self.waiting) + self._parked,
            blocks_used=self.blocks.used,
            blocks_total=self.blocks.count,
            steps=self._steps,
            tokens_in=self._tokens_in,
            tokens_out=self._tokens_out,
            preemptions=self._preemptions,
            aborts=self._aborts,
        )

    def check(self) -> None:
        """Prove between steps what must hold, or raise AssertionError."""
        parked = [s for r in (*self.running, *self.waiting) for s in r.siblings]
        everybody = [*self.running, *self.waiting, *parked]
        holds = {
            "queue and plan are sorted": all(q == sorted(q, key=_RANK) for q in (self.running, self.waiting)),
            "places are right": all(
                r.place is place
                for q, place in ((self.running, Place.RUNNING), (self.waiting, Place.WAITING), (parked, Place.PARKED))
                for r in q
            ),
            "everybody is somewhere once": sorted(r.id for r in everybody) == sorted(self._by_id),
            "users know their choices": {r.id for u in self._users.values() for r in u} == self._by_id.keys(),
            "the parked are counted": self._parked == len(parked),
            "nobody idle has computed anything": not any(r.computed or r.known for r in (*self.waiting, *parked)),
            "everybody running has something to do": all(r.computed < len(r.tokens) for r in self.running),
            "nobody is too long": all(len(r.tokens) < max(r.limit, r.prompt + 1) for r in everybody),
        }
        if broken := [what for what, held in holds.items() if not held]:
            raise AssertionError(f"does not hold: {', '.join(broken)}")
        self.blocks.check({r.id: (r.computed, r.query(self.blocks.block)) for r in self.running})

    # Planning: who gets a row.

    def _give_row(self, request: Request) -> None:
        """A row of as many tokens as budget and blocks allow; none where that is none."""
        if not self._left or len(self._rows) >= self.rows:
            return
        count = min(len(request.tokens) - request.computed, self._room(request), self._left)
        if not count:
            return
        start = request.computed
        end = start + count
        blocks = self.blocks.grow(request.id, end)
        wants_token = end == len(request.tokens) < request.limit
        self._left -= count
        self._rows[request.id] = Row(
            request.id,
            start,
            tuple(request.tokens[start:end]),
            blocks if request.known else self.blocks.table(request.id),
            _WANTS[wants_token + 2 * (request.unreported > 0)],
            0,
            0 if request.known else request.shared,
        )

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
        seats = min(self.policy.admits(self.waiting, self.running, now), self.rows - len(self.running))
        while seats > 0 and self._left and self.waiting and self._fits(self.waiting[0]):
            request = self.waiting.pop(0)
            self.blocks.open(request.id)
            self._enter(request, Place.RUNNING)
            self._give_row(request)
            seats -= 1

    def _fits(self, request: Request) -> bool:
        """All of it now, and then a block per KV group for each that runs: else it would soon be preempted again."""
        growth = len(self.running) * len(self.blocks.windows)
        return not self.running or self.blocks.need(len(request.tokens)) + growth <= self.blocks.free

    def _introduce(self, now: float) -> tuple[Admission, ...]:
        """Those in the plan whom the executor does not know."""
        admitted = []
        for r in [self._by_id[i] for i in self._rows]:
            if r.known:
                continue
            r.known = True
            admitted.append(Admission(r.id, r.choice, r.params, tuple(r.tokens), r.prompt, r.ends))
            if r.started is None:
                r.started = now
                self._tokens_in += 0 if r.choice else r.prompt
        return tuple(admitted)

    # Committing: what a row gave.

    def _take(self, request: Request, row: Row, got: RowResult, now: float, deltas: list[Delta]) -> None:
        kept = _kept(row, got)
        request.computed += len(row.tokens) - row.drafts + max(0, len(kept) - 1)
        prompt_logprobs = _news(request, row, got) if request.unreported else ()
        if request.siblings and request.computed >= request.prompt:
            self._fork(request, now, deltas)
        said = request.hear(kept)
        if said.tokens:
            self._tokens_out += len(said.tokens)
            if request.spoke is None:
                request.spoke = now
        if said.finish is None:
            self.blocks.trim(request.id, request.query(self.blocks.block))
            if not said.tokens and not prompt_logprobs:
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
                said.finish,
                said.reason,
                None,
                None if said.finish is None else self._end(request, now),
            )
        )

    def _fork(self, first: Request, now: float, deltas: list[Delta]) -> None:
        """The prompt is computed: its full blocks are shared with the siblings, who go on from there."""
        siblings, first.siblings = first.siblings, []
        for request in siblings:
            if request.params.max_tokens == 0:
                deltas.append(self._last(request, "length", None, now))
                continue
            request.shared = first.fork(self.blocks.block)
            request.computed = request.shared * self.blocks.block
            self.blocks.share(first.id, request.id, request.shared)
            self._parked -= 1
            self._enter(request, Place.RUNNING)

    # Coming and going.

    def _make(self, message: Submit, choice: int) -> Request:
        params, prompt = message.params, len(message.prompt)
        eos = frozenset() if params.ignore_eos else self._eos
        request = Request(
            id=self._next_id + choice,
            user=message.id,
            choice=choice,
            params=params,
            tokens=list(message.prompt),
            prompt=prompt,
            limit=self._most if params.max_tokens is None else min(self._most, prompt + params.max_tokens),
            eos=eos,
            ends=eos.union(params.stop_token_ids),
            text=self._text(params),
            arrived=message.arrived,
            order=self._next_order,
            unreported=0 if choice or params.prompt_logprobs is None else prompt,
        )
        request.rank = self.policy.rank(request)
        return request

    def _lead(self, family: list[Request]) -> None:
        """The first of the parked goes to the queue, the rest wait for it."""
        first, *first.siblings = family
        self._parked -= 1
        self._enter(first, Place.WAITING)

    def _enter(self, request: Request, place: Place) -> None:
        request.place = place
        insort(self.running if place is Place.RUNNING else self.waiting, request, key=_RANK)

    def _leave(self, request: Request) -> None:
        """Out of its place; its blocks and what the executor knows of it go."""
        if request.place is Place.PARKED:
            self._parked -= 1
            return
        queue = self.running if request.place is Place.RUNNING else self.waiting
        del queue[bisect_left(queue, request.rank, key=_RANK)]
        if request.place is Place.RUNNING:
            self.blocks.release(request.id)
        if request.known:
            self._released.append(request.id)
        request.known = False
        request.computed = request.shared = 0

    def _end(self, request: Request, now: float) -> Timings:
        """Forget the request."""
        self._leave(request)
        del self._by_id[request.id]
        family = self._users[request.user]
        family.remove(request)
        if not family:
            del self._users[request.user]
        if request.siblings:
            self._lead(request.siblings)
        return request.timings(now)

    def _last(self, request: Request, finish: str, error: str | None, now: float) -> Delta:
        """End a request that nothing more is to come from."""
        timings = self._end(request, now)
        return Delta(request.user, request.choice, text=request.rest(), finish=finish, error=error, timings=timings)


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
    new = row.start + len(row.tokens) - (request.prompt - request.unreported)
    if new <= 0:
        return ()
    request.unreported -= new
    return got.prompt_logprobs[-new:]
