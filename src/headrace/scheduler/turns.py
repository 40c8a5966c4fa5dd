"""In which order requests take their turns: the seam, and its member, fair shares with priorities.

It ranks requests and knows neither blocks nor batches: how many of the first may join is `scheduler.policy`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace.scheduler.request import Request

PRIORITY_TOKENS = 8192
"""What one class of priority is worth: so many tokens of work another request may have been ahead and is overtaken."""
EXPECTED_ANSWER = 256
"""Tokens that an answer is charged until its length is known, where it may be that long."""


class Turns(Protocol):
    """One order of the queue."""

    def rank(self, request: Request) -> tuple[int, ...]:
        """Lower goes first in queue and plan, the highest running is preempted first. Asked once, when it arrives;
        unique."""

    def begins(self, request: Request) -> None:
        """It leaves the queue for the first time."""

    def ends(self, request: Request) -> None:
        """It has come to its end, whether it had begun or not."""


@dataclass(slots=True)
class _Tenant:
    live: int
    """Its choices in queue and plan."""
    start: int
    """Start tag of its latest."""
    finish: int
    """Where, in virtual time, all that it asked for ends."""


class FairShare:
    """Fair queueing over tenants by tags of virtual time, in tokens (Demers et al. 1989; start-time fair queueing,
    Goyal et al. 1996). With one tenant and one priority it is first come, first served.

    A request's tag is where its tenant's requests before it end in virtual time, but not before `now`; it is fixed when
    it arrives. Virtual time moves with what is begun: to its tag, and on by its share, its tokens divided by the number
    of tenants that have requests here. So a tenant with many requests stands behind its own, one with few behind nobody
    else's, and since `now` passes every tag after a bounded amount of work, nobody is overtaken for ever, not by new
    tenants either. A class of priority is a tag earlier by `PRIORITY_TOKENS`: ageing is built in.

    An answer is charged as expected, to its tenant when it arrives, to the time when it begins; when it has ended, both
    are set right. What tenants used is forgotten where virtual time has passed it, and when all is done.
    """

    def __init__(self) -> None:
        self.now = 0
        self._owed = 0
        """What `now` has gone too far, as answers were shorter than expected: below zero, or zero."""
        self._tenants: dict[str, _Tenant] = {}
        self._active = 0
        """Tenants with requests here."""
        self._begun: dict[int, int] = {}
        """Requests that have begun: how many tenants they shared virtual time with."""

    def rank(self, request: Request) -> tuple[int, ...]:
        tenant = self._tenants.setdefault(request.tenant, _Tenant(0, self.now, self.now))
        first = tenant.start if tenant.live else self.now  # its own stay in their order, whatever is given back
        tenant.start = max(self.now, tenant.finish, first)
        tenant.finish = max(self.now, tenant.finish) + _expected(request)
        self._active += not tenant.live
        tenant.live += 1
        return (tenant.start - PRIORITY_TOKENS * request.params.priority, request.order, request.choice)

    def begins(self, request: Request) -> None:
        tag = request.rank[0] + PRIORITY_TOKENS * min(
            request.params.priority, 0
        )  # a low priority must not hurry newcomers on
        self.now = max(self.now, tag)
        self._begun[request.id] = self._active
        self._move(_expected(request), self._active)
        if len(self._tenants) > 2 * self._active:
            self._tenants = {name: t for name, t in self._tenants.items() if t.live or t.finish > self.now}

    def ends(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        used = 0
        if among := self._begun.pop(request.id, 0):
            used = _tokens(request, request.answered)
            self._move(used - _expected(request), among)
        tenant.finish += used - _expected(request)
        tenant.live -= 1
        self._active -= not tenant.live
        if not self._active:
            self._tenants.clear()

    def _move(self, tokens: int, among: int) -> None:
        self._owed += -(-tokens // among)  # rounded up: it moves on by something for whatever was computed
        self.now += max(0, self._owed)
        self._owed = min(0, self._owed)


def _tokens(request: Request, answer: int) -> int:
    """The choices of one request share its prompt."""
    return answer if request.choice else request.reads + answer


def _expected(request: Request) -> int:
    return _tokens(request, min(request.limit - request.prompt, EXPECTED_ANSWER))
