"""One HTTP request from its arrival to its end, whatever it asks for: who asks, what it costs, what came of it.

Owns the requests under way and what is done at their end: limits corrected, metrics counted, one line logged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

from headrace.engine.outputs import Chunk
from headrace.serve.key_file import Key
from headrace.serve.limits import Exceeded, KeyLimits
from headrace.serve.logs import event
from headrace.serve.metrics import Metrics
from headrace.serve.problems import Problem, over_limit

_log = logging.getLogger("headrace.requests")

_PLACE = "headrace.visit"
QUIET = ("/live", "/health", "/metrics")
"""Paths that are asked all the time: their lines are logged at level debug."""
PATH = 200
"""Most characters of a path in the log."""


@dataclass(slots=True)
class _Told:
    """How far one choice has come."""

    last: float
    first: float
    tokens: int = 0
    finish: str | None = None


@dataclass(slots=True)
class Visit:
    """One HTTP request. Those who answer it fill in what they know."""

    visits: Visits
    request_id: str
    method: str
    path: str
    client: str | None
    began: float = field(default_factory=time.monotonic)
    tenant: str = ""
    """Whose it is, for fair shares: the key's name, or what tells the senders of other headers apart."""
    key: Key | None = None
    counted: bool = False
    """Whether the limits of its key know of it."""
    charged: int = 0
    """Tokens that were taken of what its key has left."""
    status: int | None = None
    error: str | None = None
    """The code of the error that ended it."""
    model: str | None = None
    streamed: bool | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    queued_s: float | None = None
    first_token_s: float | None = None
    engine_ids: list[str] = field(default_factory=list)
    choices: dict[int, _Told] = field(default_factory=dict)
    expected: int = 0
    """Choices that were started."""
    prompt_texts: list[Callable[[], str]] = field(default_factory=list)
    answers: dict[int, list[str]] = field(default_factory=dict)

    def charge(self, tokens: int) -> None:
        """Problem 429 where its key has not so many tokens left."""
        if self.key is not None:
            try:
                self.charged = self.visits.limits.charge(self.key, tokens, time.monotonic())
            except Exceeded as error:
                raise over_limit(str(error), error.retry_s) from None

    def started(self, engine_id: str, tokens: int, choices: int, text: Callable[[], str]) -> None:
        """One prompt of so many tokens was handed to the engine."""
        self.engine_ids.append(engine_id)
        self.prompt_tokens += tokens
        self.expected += choices
        self.visits.metrics.prompt_tokens.observe(tokens)
        if self.visits.texts:
            self.prompt_texts.append(text)

    def heard(self, index: int, chunk: Chunk) -> None:
        """The engine added this to a choice."""
        metrics, at = self.visits.metrics, chunk.at or time.monotonic()
        count = len(chunk.token_ids)
        told = self.choices.get(index)
        if told is None:
            told = self.choices[index] = _Told(at, at)
            if count:
                metrics.time_to_first_token.observe(at - self.began)
                if self.first_token_s is None:
                    self.first_token_s = at - self.began
        elif count:
            metrics.inter_token_latency.observe((at - told.last) / count, count)
        told.last = at
        told.tokens += count
        self.completion_tokens += count
        if self.visits.texts:
            self.answers.setdefault(index, []).append(chunk.text)
        if chunk.finish_reason is not None:
            self._ended(told, chunk, at)

    def _ended(self, told: _Told, chunk: Chunk, at: float) -> None:
        metrics = self.visits.metrics
        told.finish = chunk.finish_reason
        metrics.finished[chunk.finish_reason or ""] += 1
        metrics.latency.observe(at - self.began)
        metrics.generation_tokens.observe(told.tokens)
        if told.tokens > 1:
            metrics.time_per_output_token.observe((at - told.first) / (told.tokens - 1))
        if (timings := chunk.timings) is not None:
            metrics.queue_time.observe(timings.queued_s)
            if self.queued_s is None:
                self.queued_s = timings.queued_s
            if told.tokens:
                metrics.prefill_time.observe(timings.first_token_s - timings.queued_s)
                metrics.decode_time.observe(timings.total_s - timings.first_token_s)

    def refused(self, problem: Problem) -> None:
        """It ended, or will end, with this error."""
        self.error = problem.code or str(problem.status)

    def headers(self) -> dict[str, str]:
        """What its answer tells of the limits of its key."""
        if self.key is None or self.method != "POST":
            return {}
        return self.visits.limits.headers(self.key, time.monotonic())


class Visits:
    """Those under way. `texts`: prompts and answers are logged. `unread_tokens` may wait for a client. `paths` are
    those that metrics tell apart; whatever else a client asks for is `other`."""

    def __init__(
        self, metrics: Metrics, limits: KeyLimits, *, texts: bool, unread_tokens: int, paths: Set[str]
    ) -> None:
        self.metrics = metrics
        self.limits = limits
        self.texts = texts
        self.unread_tokens = unread_tokens
        self._paths = paths

    @property
    def under_way(self) -> int:
        return self.metrics.under_way

    def begin(self, scope: Scope, request_id: str) -> Visit:
        """A request has arrived; `end` must follow."""
        client = scope.get("client")
        visit = Visit(self, request_id, scope["method"], scope["path"], client and client[0])
        scope[_PLACE] = visit
        self.metrics.under_way += 1
        return visit

    def end(self, visit: Visit) -> None:
        """Nothing more comes of it."""
        metrics = self.metrics
        metrics.under_way -= 1
        used = visit.prompt_tokens + visit.completion_tokens
        if visit.key is not None:
            if visit.counted:
                self.limits.end(visit.key, visit.charged, used if visit.charged else 0, time.monotonic())
            metrics.by_key[visit.key.name, "prompt"] += visit.prompt_tokens
            metrics.by_key[visit.key.name, "generation"] += visit.completion_tokens
        ended = sum(told.finish is not None for told in visit.choices.values())
        if visit.expected > ended:
            metrics.finished["abort"] += visit.expected - ended
        status = str(visit.status or 499)
        path = visit.path if visit.path in self._paths else "other"
        method = visit.method if visit.method in ("GET", "POST", "OPTIONS", "HEAD") else "other"
        metrics.answered[method, path, status] += 1
        if visit.error is not None and status != "200":
            metrics.refused[visit.error] += 1
        level = logging.DEBUG if visit.path in QUIET else logging.INFO
        if _log.isEnabledFor(level):
            event(_log, level, "request", self._told(visit))

    def _told(self, visit: Visit) -> dict[str, Any]:
        """The fields of its line."""
        generates = bool(visit.engine_ids)
        finishes = [told.finish or "abort" for _, told in sorted(visit.choices.items())]
        finishes += ["abort"] * (visit.expected - len(finishes))
        fields: dict[str, Any] = {
            "request_id": visit.request_id,
            "client": visit.client,
            "key": visit.key and visit.key.name,
            "method": visit.method[:PATH],
            "path": visit.path[:PATH],
            "status": visit.status or 499,
            "error": visit.error,
            "model": visit.model,
            "stream": visit.streamed,
            "prompt_tokens": visit.prompt_tokens if generates else None,
            "completion_tokens": visit.completion_tokens if generates else None,
            "cached_tokens": visit.cached_tokens if generates else None,
            "queue_ms": _ms(visit.queued_s),
            "first_token_ms": _ms(visit.first_token_s),
            "total_ms": _ms(time.monotonic() - visit.began),
            "finish_reasons": finishes,
            "engine_ids": visit.engine_ids,
        }
        if self.texts:
            texts = visit.prompt_texts
            fields["prompts"] = lambda: [text() for text in texts]
            fields["answers"] = ["".join(parts) for _, parts in sorted(visit.answers.items())]
        return fields


def visit_of(scope: Scope) -> Visit:
    """The visit that the request of this ASGI scope is."""
    visit: Visit = scope[_PLACE]
    return visit


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)
