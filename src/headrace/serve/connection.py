"""One HTTP/1.1 connection: uvicorn's, with bounds on what a client may do to it. Knows bytes and uvicorn, no routes.

uvicorn tells only the request that came last that its client has left, reads heads of any size, waits for ever for what
is not sent, takes trailers for headers, loses the body of a request that offers another protocol, and accepts more
connections than there are descriptors. What it does with a request that was read whole is left as it is.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import sys
import threading
from collections import deque
from http import HTTPStatus
from typing import Any

import httptools
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace.serve.options import ServerOptions
from headrace.serve.problems import Problem, unavailable
from headrace.serve.written import as_json

AHEAD = 16
"""Requests that may wait behind the one that is answered while the socket is still read, and a leaving noticed."""


READ_BYTES = 2**16
"""Most bytes that are read from a socket at once."""


ACCEPTED = 32
"""Most connections accepted at once, before any of them can be refused. asyncio takes the socket's backlog for it, and
where the process has no descriptor left it logs each of those with a traceback, again and again."""


class _Buffer(threading.local):
    """One for each event loop: loops of several threads read at the same time."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(READ_BYTES))


_buffer = _Buffer()


def most_connections(asked: int | None) -> int:
    """As many as the option says, and no more than half of the descriptors that the process may have; the rest is for
    files and what was accepted meanwhile."""
    half = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
    return half if asked is None else min(asked, half)


class _Parser(httptools.HttpRequestParser):
    """Goes on in HTTP/1.1 where a client offers another protocol (`Upgrade`), as every server may (RFC 9110, 7.8). To
    httptools what follows such a head is in that protocol; but it is the request's body. Java's client offers HTTP/2
    with its first request to a server, whatever that is.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._connection = connection
        # requests that come before the answer that closes the connection are no error, as in uvicorn
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    def offers(self) -> bool:
        """Whether the last head offered another protocol, and is a request nevertheless."""
        return bool(self.should_upgrade()) and self.get_method() != b"CONNECT"

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]
        while True:
            try:
                return super().feed_data(data)
            except httptools.HttpParserUpgrade as offered:
                if not self.offers():
                    raise
                data = self._connection.head_without_offer() + data[offered.args[0] :]


class Connection(HttpToolsProtocol, asyncio.BufferedProtocol):
    """The methods are callbacks: of the event loop, and of the parser that `data_received` feeds.

    All connections read into one buffer. asyncio's own way is to allocate 256 KiB for each read and to give back what
    was not needed: where hundreds come and leave, what lives longer comes to lie in the gaps, until none is large
    enough any more, and resident memory grows though no more of it is in use.

    Of the options, `head_bytes` bounds the head of a request, and what comes between two pieces of its body (one read
    of the socket more may pass); `silence_s` how long a client that has begun to connect or to send may be silent;
    `unread_s` how long one may take nothing of what waits for it.
    """

    def __init__(self, limits: ServerOptions, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parser: _Parser = _Parser(self)
        self._in_head = True
        self._limits = limits
        self._answer = self.app
        self.app = self._answer_who_is_there
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._loose = 0
        """Bytes since the last head or piece of a body ended."""
        self._sending = True
        """Whether it is for the client to send something; `_silence` then looks whether it does."""
        self._heard = 0.0
        self._silence: asyncio.TimerHandle | None = None
        self._unread = 0
        """Bytes that waited for the client when it was last looked whether it reads; none are added before it has."""
        self._reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if (sock := transport.get_extra_info("socket")) is not None and sock.family != socket.AF_UNIX:
            # asyncio does it for sockets that say they are TCP; others, inherited ones, would hold small writes back
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > most_connections(self._limits.connections):
            self._refuse(
                unavailable("the server has as many connections as it can", "too_many_connections", retry=True)
            )
            return
        self._heard = self.loop.time()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._silence, self._reading):
            if timer is not None:
                timer.cancel()
        self._tell_all()
        super().connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _buffer.view

    def buffer_updated(self, nbytes: int) -> None:
        """The loop has read so many bytes; nobody reads before this has returned."""
        self.data_received(bytes(_buffer.view[:nbytes]))

    def data_received(self, data: bytes) -> None:
        self._heard = self.loop.time()
        self._loose += len(data)
        super().data_received(data)
        if self._loose > self._limits.head_bytes and not self.transport.is_closing():
            message = (
                f"the head of the request is larger than the {self._limits.head_bytes} bytes that this server takes"
            )
            self._refuse(Problem(431, message, code="request_too_large"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._sending = True
        self._watch()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers come after the request was judged, by whoever stands before this server, too
            super().on_header(name, value)

    def head_without_offer(self) -> bytes:
        """The last head, which offered another protocol, once more without that."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self.parser.offers():
            return  # it comes again
        self._loose = 0
        super().on_headers_complete()
        while self._unanswered and self._unanswered[0].response_complete:
            self._unanswered.popleft()
        self._unanswered.append(self.cycle)
        if len(self.pipeline) < AHEAD:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._loose = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.offers():
            return
        self._loose = 0
        self._sending = False
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread = sys.maxsize  # it has read

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unread = sys.maxsize  # something came after what was counted
        self._watch_reading()

    async def _answer_who_is_there(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application. A failed write is told in the loop's next turn only; asyncio logs every one until then."""

        async def sent(message: Message) -> None:
            if self.transport.is_closing():
                self._tell_all()
            await send(message)

        await self._answer(scope, receive, sent)

    def _tell_all(self) -> None:
        """The client has left."""
        for cycle in self._unanswered:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _refuse(self, problem: Problem) -> None:
        """Where an earlier request is still answered there is no place to say so."""
        if all(cycle.response_complete for cycle in self._unanswered):
            body = as_json(problem.body())
            lines = [f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}", "content-type: application/json"]
            lines += [f"{name}: {value}" for name, value in problem.headers.items()]
            lines += [f"content-length: {len(body)}", "connection: close", "", ""]
            self.transport.write("\r\n".join(lines).encode() + body)
        self.transport.close()

    def _watch_reading(self) -> None:
        """Where something waits for the client, look now and then whether it takes some of it."""
        if self._reading is None and (waits := self.transport.get_write_buffer_size()):
            self._unread = waits
            self._reading = self.loop.call_later(self._limits.unread_s, self._look_whether_it_reads)

    def _look_whether_it_reads(self) -> None:
        self._reading = None
        if self.transport.get_write_buffer_size() >= self._unread:
            self.transport.abort()
        else:
            self._watch_reading()

    def _watch(self) -> None:
        if self._silence is None:
            self._silence = self.loop.call_later(self._limits.silence_s, self._look)

    def _look(self) -> None:
        self._silence = None
        if not self._sending or self.transport.is_closing():
            return
        left = self._heard + self._limits.silence_s - self.loop.time()
        if left <= 0:
            self.transport.close()
        else:
            self._silence = self.loop.call_later(left, self._look)
