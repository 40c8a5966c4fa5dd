"""Who may ask: API keys and the limits that count requests. Stands before the application; knows no routes but those
that are open to all."""

from __future__ import annotations

import hashlib
import secrets
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.serve.keys import Keys
from headrace.serve.limits import Exceeded, KeyLimits
from headrace.serve.problems import Problem, over_limit, unauthorized
from headrace.serve.visits import Visit, visit_of

OPEN = ("/health", "/live")
"""Paths that never need a key: who probes them has none."""


class Access:
    """Lets a request through to `app`, or answers 401 or 429. Where no keys are set anybody may ask, and keys that are
    sent only tell tenants apart."""

    def __init__(self, app: ASGIApp, keys: Keys, limits: KeyLimits, *, open_metrics: bool) -> None:
        self._app = app
        self._keys = keys
        self._limits = limits
        self._open = (*OPEN, "/metrics") if open_metrics else OPEN
        self._salt = secrets.token_bytes(16)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            visit = visit_of(scope)
            try:
                self._judge(scope, visit)
            except Problem as problem:
                visit.refused(problem)
                await problem.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _judge(self, scope: Scope, visit: Visit) -> None:
        given = Headers(scope=scope).get("authorization")
        if not self._keys.required:
            visit.tenant = self._told_apart(given)
        elif visit.path not in self._open:
            self._admit(given, visit)

    def _admit(self, given: str | None, visit: Visit) -> None:
        if not given:
            raise unauthorized("an API key is needed: send it as Authorization: Bearer KEY")
        kind, _, value = given.partition(" ")
        key = self._keys.find(value.strip()) if kind.lower() == "bearer" else None
        if key is None:
            raise unauthorized("this API key is not known here")
        visit.key, visit.tenant = key, key.name
        if visit.method == "POST":
            try:
                self._limits.begin(key, time.monotonic())
            except Exceeded as error:
                raise over_limit(str(error), error.retry_s) from None
            visit.counted = True

    def _told_apart(self, given: str | None) -> str:
        """A digest of what was sent that says nothing elsewhere: keys are neither kept nor shown. Everybody without one
        is the same."""
        return hashlib.blake2b(given.encode(), digest_size=16, key=self._salt).hexdigest() if given else ""
