"""Work that stops when the client leaves, and streams of events. Knows ASGI, nothing of what is sent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class Stopped(Exception):
    """The server stopped before the work was done: it cancels what still runs when the time of grace is over."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, cancelling it as soon as the client leaves (ClientDisconnect) or the server stops (Stopped).

    The request's body must have been read: `receive` only tells about the connection from there on.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_leaving(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    except asyncio.CancelledError:
        raise Stopped from None
    finally:
        task.cancel()
        watcher.cancel()
        await _both_ended(task, watcher)


async def _both_ended(*tasks: asyncio.Future[Any]) -> None:
    """Waits for cancelled tasks, also where the waiting is cancelled: a server that stops does so more than once."""
    while not all(task.done() for task in tasks):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait(tasks)


async def _leaving(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response of server-sent events, each sent as soon as the generator gives it.

    A client that reads slowly holds up its own generator and nobody else; one that leaves closes it. Where the server
    stops before the end, `farewell` gives the last event. `ended` is called in every case, once nothing more is sent.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], *, farewell: Callable[[], bytes], ended: Callable[[], None]
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(None, 200, headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events = events
        self._farewell = farewell
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await unless_gone(receive, self._send_all(send))
        except ClientDisconnect:
            return
        except Stopped:
            await send({"type": "http.response.body", "body": self._farewell(), "more_body": True})
        finally:
            self._ended()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, send: Send) -> None:
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        finally:
            await self._events.aclose()
