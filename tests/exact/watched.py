"""What the scheduler of a loaded model decided, step by step: the proof that what a test is about really happened."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from headrace.engine.build import Loaded
from headrace.execute.plan import Plan, Result, Row
from headrace.scheduler.messages import Delta
from headrace.scheduler.request import Place, Request

QUEUED, READING, ANSWERING, PARTLY_DONE = "queued", "reading", "answering", "with a choice done"


@dataclass(frozen=True)
class Back:
    """A block that a request had computed before it was preempted, and that a tier gave back: the request went on
    behind it, and computed none of it again."""

    request: int
    preemption: int
    """Of the request, from 1 on."""
    index: int
    answer: bool
    """Nothing of the prompt was in it."""


@dataclass
class Lost:
    """A request that was preempted, until it is as far as it was."""

    computed: int
    """So far."""
    again: list[range] = field(default_factory=list)
    """Positions that its rows have computed since."""


class Watched:
    """Everything that a model's engine does from now on; `check` must hold after every step.

    A request in `leaves` is aborted after the first step that leaves it in that state, on the engine's own thread.
    """

    def __init__(self, model: Loaded) -> None:
        self.scheduler = model._engine._scheduler
        self.leaves: dict[int, str] = {}
        self.steps: list[tuple[Row, ...]] = []
        self.begun: list[int] = []
        """Users in the order in which their choices began."""
        self.left: Counter[str] = Counter()
        """In which state requests were when they were aborted."""
        self.copies = 0
        """Rows that began with a part of somebody else's block."""
        self.cuts = 0
        """Rows that ended before their prompt did."""
        self.trimmed = False
        """Has a block left a window while its request ran?"""
        self.back: set[Back] = set()
        self._model = model
        self._lost: dict[int, Lost] = {}
        self._fetched: set[bytes] = set()
        self._plan, self._commit, self._abort = self.scheduler.plan, self.scheduler.commit, self.scheduler.abort
        self._begins = self.scheduler.turns.begins
        self.scheduler.plan = self.plan  # type: ignore[method-assign]
        self.scheduler.commit = self.commit  # type: ignore[method-assign]
        self.scheduler.abort = self.abort  # type: ignore[method-assign]
        self.scheduler.turns.begins = self.begins  # type: ignore[method-assign]

    def together(self) -> AbstractContextManager[object]:
        """What is submitted inside arrives in one step."""
        return self._model._engine._wake

    @property
    def most_rows(self) -> int:
        return max(map(len, self.steps), default=0)

    @property
    def most_tokens(self) -> int:
        return max((sum(len(row.tokens) for row in rows) for rows in self.steps), default=0)

    # What is put before the scheduler's own.

    def plan(self) -> Plan | None:
        before = {r.id: r for r in self.scheduler.running}
        computed = {r.id: r.computed for r in self.scheduler.running}
        plan = self._plan()
        for id, request in before.items():
            if request.place is Place.WAITING:
                self._lost[id] = Lost(max(computed[id], self._lost[id].computed if id in self._lost else 0))
                self._fetched.difference_update(request.keys)
        if plan is not None:
            self.copies += sum(bool(row.copied) for row in plan.rows)
            by_id = {r.id: r for r in self.scheduler.running}
            for row in plan.rows:
                r = by_id[row.request]
                self.cuts += len(r.left_out) + row.start + len(row.tokens) < r.prompt
                self._came_back(by_id[row.request], row)
        return plan

    def _came_back(self, request: Request, row: Row) -> None:
        if (lost := self._lost.get(request.id)) is None or request.left_out:  # a later window takes nothing back
            return
        block = self.scheduler.blocks.block
        for index in range(min(row.start, lost.computed) // block):
            own = any(index * block < r.stop and r.start < (index + 1) * block for r in lost.again)
            if request.keys[index] in self._fetched and not own:
                answer = index * block >= request.prompt
                self.back.add(Back(request.id, request.preemptions, index, answer))
        lost.again.append(range(row.start, row.start + len(row.tokens)))
        if lost.again[-1].stop >= lost.computed:
            del self._lost[request.id]

    def commit(self, plan: Plan, result: Result) -> list[Delta]:
        deltas = self._commit(plan, result)
        self.scheduler.check()
        self.steps.append(plan.rows)
        self._fetched.update(move.key for move in result.moved if move.load and move.done)
        tables = self.scheduler.blocks
        self.trimmed = self.trimmed or any(-1 in ids for r in self.scheduler.running for ids in tables.table(r.id))
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            if self.leaves.get(request.user) in self.states(request):
                del self.leaves[request.user]
                self._model.abort(request.user)
        return deltas

    def abort(self, user: int) -> list[Delta]:
        family = [r for r in [*self.scheduler.running, *self.scheduler.waiting] if r.user == user]
        self.left.update(set().union(*map(self.states, family)))
        deltas = self._abort(user)
        self.scheduler.check()
        left = [r.choice for r in [*self.scheduler.running, *self.scheduler.waiting] if r.user == user]
        assert not left, f"choices {left} of an aborted request live on"
        return deltas

    def begins(self, request: Request) -> None:
        self.begun.append(request.user)
        self._begins(request)

    def states(self, request: Request) -> set[str]:
        family = sum(r.user == request.user for r in [*self.scheduler.running, *self.scheduler.waiting])
        states = {PARTLY_DONE} if family < request.params.n else set()
        if request.place is Place.WAITING and not request.preemptions:
            states.add(QUEUED)
        if request.computed > 0 and len(request.left_out) + request.computed < request.prompt:
            states.add(READING)
        if request.answered:
            states.add(ANSWERING)
        return states
