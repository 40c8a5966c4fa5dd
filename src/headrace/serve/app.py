"""The server as a process: a socket, signals, one model. `create_app` is the application alone, for other servers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp

from headrace.errors import OptionError
from headrace.serve.connection import ACCEPTED, Connection
from headrace.serve.logs import event
from headrace.serve.options import ServerOptions
from headrace.serve.routes import Application, application
from headrace.serve.service import Service
from headrace.serve.tls import tls_context
from headrace.serve.visits import Visits

if TYPE_CHECKING:
    from headrace.engine.async_llm import AsyncLLM
    from headrace.engine.build import Blueprint
    from headrace.loading.progress import Progress

_log = logging.getLogger("headrace.server")

WAITING = 2048
"""How many connections may wait to be accepted."""

LAST_S = 5
"""How long uvicorn may take to end, when nothing runs any more."""

TOLD_S = 0.5
"""How long requests whose time of grace is over have to tell their clients so."""


LEFT_S = 2.0
"""How long the process may take to end once the server has."""


def create_app(
    load: Callable[[], AsyncLLM],
    *,
    name: str | None = None,
    options: ServerOptions | None = None,
) -> Application:
    """The application. `load` makes the model and is called in a thread when the application starts; until it returns
    whatever needs the model, /health too, answers 503. `name` is what the model is called, by default what it
    calls itself. Of the options those of sockets, logs and the process's end are for whoever runs it. Installs no
    signal handlers.
    """
    options = options or ServerOptions()
    return application(Service(load, name=name, restarts=options.restarts), options)


def serve(
    model: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    options: Mapping[str, Any] | None = None,
    server: ServerOptions | None = None,
    progress: Progress | None = None,
    planned: Callable[[Blueprint], None] | None = None,
    loaded: Callable[[], None] | None = None,
) -> None:
    """Serve a model until SIGINT or SIGTERM, then return. `options` are those of `LLM`, flat; `name` is what clients
    call the model, by default what it calls itself, or `model` where that is a name and no file. `planned` is called
    on another thread once everything is sized, before weights are read; `loaded` when the model is ready, before that
    is printed: `progress` is at its end.

    Prints one line when it is ready. Raises OptionError where the address, the keys or the certificate cannot be used,
    what `LLM` raises where the model cannot be loaded, and EngineDeadError where the engine dies for good.
    """

    def load() -> AsyncLLM:
        from headrace.engine.async_llm import AsyncLLM

        return AsyncLLM(model, progress=progress, planned=planned, **(options or {}))

    alias = None if Path(model).exists() else model
    run(load, host=host, port=port, name=name, alias=alias, loaded=loaded, options=server)


def run(
    load: Callable[[], AsyncLLM],
    *,
    host: str,
    port: int,
    name: str | None = None,
    alias: str | None = None,
    loaded: Callable[[], None] | None = None,
    options: ServerOptions | None = None,
) -> None:
    """`serve` for a model that `load` makes."""
    options = options or ServerOptions()
    failure: list[Exception] = []
    said: list[bool] = []

    def take(outcome: AsyncLLM | Exception) -> None:
        if isinstance(outcome, Exception):
            end(outcome)
            return
        _freeze()
        if not said:
            said.append(True)
            if loaded is not None:
                loaded()
            address = _address(options.scheme, host, sock.getsockname()[1])
            print(_ready_line(service.names(outcome)[0], outcome, address), flush=True)

    def end(error: Exception) -> None:
        failure.append(error)
        server.give_up()

    service = Service(load, name=name, alias=alias, loaded=take, restarts=options.restarts, ended=end)
    app = application(service, options)
    config = configured(app, options)
    sock = listening(host, port)
    _take_descriptors()
    server = _Server(config, service, app.visits, options.grace_s)
    try:
        server.run(sockets=[sock])
    finally:
        sock.close()
        gc.unfreeze()
    if failure:
        raise failure[0]


@contextlib.contextmanager
def ending_in_time() -> Iterator[None]:
    """For a program whose end this is. Python waits then for every thread, however long it still loads a model, or
    compiles a grammar, for nobody: no longer than `LEFT_S`, nor than to the next signal. The exit code is 0, or 1
    where there was an error."""
    code = 1
    try:
        yield
        code = 0
    finally:
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, lambda *_: _end(code))
        last = threading.Timer(LEFT_S, _end, (code,))
        last.daemon = True
        last.start()


def _end(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def configured(app: ASGIApp, options: ServerOptions) -> uvicorn.Config:
    """uvicorn as it serves us. OptionError where the certificate cannot be used."""
    tls = tls_context(options)
    return uvicorn.Config(
        app,
        loop="asyncio",
        http=partial(Connection, options),  # type: ignore[arg-type]
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=options.keep_alive_s,
        timeout_graceful_shutdown=options.grace_s,
        backlog=ACCEPTED,
        ssl_context_factory=None if tls is None else lambda config, default: tls,
    )


def _freeze() -> None:
    """What a loaded model is made of is here to stay: the garbage collector need not go through it again and again.
    Its full collections took 5 to 11 ms otherwise, in which no stream goes on. Only in a server's own process: what is
    frozen is never collected, until the service thaws it where an engine died."""
    gc.collect()
    gc.freeze()


def _address(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _ready_line(name: str, llm: AsyncLLM, address: str) -> str:
    facts = f"model {name}, context {llm.model.context:,} tokens, threads {llm.model.threads}"
    return f"ready: {address}/v1 ({facts})"


def listening(host: str, port: int) -> socket.socket:
    """A listening socket, taken before anything is loaded, so that a wrong address is told at once: OptionError."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, OverflowError, UnicodeError) as error:
        raise OptionError(f"host {host!r} with port {port} is no address to listen at: {error}", "host") from None
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen()  # so that a second server is refused here, and not once it serves
    except OSError as error:
        sock.close()
        raise OptionError(
            f"cannot listen at {host} port {port}: {error.strerror}; choose another --port", "port"
        ) from None
    return sock


def _take_descriptors() -> None:
    """As many files and connections as the system lets this process have; the default is for users of `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Server(uvicorn.Server):
    """uvicorn, ending in our way. A signal is an orderly end and not re-raised: nothing new is taken at once, while
    connections still are, so that who asks is told 503; running requests go on for `grace_s`, what is left then gets an
    error. A second signal does not wait."""

    def __init__(self, config: uvicorn.Config, service: Service, visits: Visits, grace_s: float) -> None:
        super().__init__(config)
        self._service = service
        self._visits = visits
        self._grace_s = grace_s
        config.timeout_graceful_shutdown = LAST_S

    def give_up(self) -> None:
        """End soon: no request can be served any more."""
        self._grace_s = min(self._grace_s, TOLD_S)
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        self._service.drain()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(WAITING)  # uvicorn has set it to what is accepted at once

    async def main_loop(self) -> None:
        await super().main_loop()
        self._service.drain()
        until = time.monotonic() + self._grace_s
        left = {"running": self._visits.under_way, "grace_s": self._grace_s}
        event(_log, logging.INFO, "draining", left)
        while self._visits.under_way and not self.force_exit and time.monotonic() < until:
            await asyncio.sleep(0.02)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        if tasks := list(self.server_state.tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=TOLD_S)
        cut = asyncio.get_running_loop().call_later(TOLD_S, self._cut)
        await super().shutdown(sockets)
        cut.cancel()
        if self.force_exit:  # then uvicorn leaves the application as it is
            await self.lifespan.shutdown()

    def _cut(self) -> None:
        """Connections that nobody reads, or closes, are not waited for."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)
