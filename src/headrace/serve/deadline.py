"""How long one request may take. Knows time, not what is done in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from headrace.errors import RequestError
from headrace.serve.problems import timed_out

T = TypeVar("T")

MOST_S = 86_400.0
"""Largest `timeout_s`."""


class Deadline:
    """`seconds` after it was made, from a running event loop; None: never."""

    def __init__(self, seconds: float | None) -> None:
        if seconds is not None and not 0 < seconds <= MOST_S:
            raise RequestError(f"timeout_s must be above 0, at most {MOST_S:g}, not {seconds:g}", "timeout_s")
        self._loop = asyncio.get_running_loop()
        self._at = None if seconds is None else self._loop.time() + seconds

    async def bound(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, cancelled at the deadline: Problem 408."""
        try:
            async with asyncio.timeout_at(self._at):
                return await work
        except TimeoutError:
            raise timed_out() from None

    def then(self, call: Callable[[], None]) -> Callable[[], None]:
        """Have `call` called at the deadline; what comes back takes that back."""
        if self._at is None:
            return _nothing
        return self._loop.call_at(self._at, call).cancel


def _nothing() -> None:
    pass
