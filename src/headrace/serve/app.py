"""The server as a process: a socket, signals, one model. `create_app` is the application alone, for other servers."""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp

from headrace.errors import OptionError
from headrace.serve.connection import ACCEPTED, Connection
from headrace.serve.reading import BODY_BYTES
from headrace.serve.routes import application
from headrace.serve.service import Service

if TYPE_CHECKING:
    from headrace.engine.build import Blueprint
    from headrace.engine.llm import AsyncLLM
    from headrace.loading.progress import Progress

WAITING = 2048
"""How many connections may wait to be accepted."""

GRACE_S = 10
"""How long running requests may go on when the server is told to stop."""


def create_app(
    load: Callable[[], AsyncLLM],
    *,
    name: str | None = None,
    body_bytes: int = BODY_BYTES,
) -> ASGIApp:
    """The application. `load` makes the model and is called in a thread when the application starts; until it returns
    /health and all of /v1 answer 503. `name` is what the model is called, by default what it calls itself. Installs no
    signal handlers.
    """
    return application(Service(load, name=name), body_bytes)


def serve(
    model: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    planned: Callable[[Blueprint], None] | None = None,
    loaded: Callable[[], None] | None = None,
) -> None:
    """Serve a model until SIGINT or SIGTERM, then return. `options` are those of `LLM`, flat; `name` is what clients
    call the model, by default what it calls itself, or `model` where that is a name and no file. `planned` is called
    on another thread once everything is sized, before weights are read; `loaded` when the model is ready, before that
    is printed: `progress` is at its end.

    Prints one line when it is ready. Raises OptionError where the address cannot be used, and what `LLM` raises where
    the model cannot be loaded.
    """

    def load() -> AsyncLLM:
        from headrace.engine.llm import AsyncLLM

        return AsyncLLM(model, progress=progress, planned=planned, **(options or {}))

    run(load, host=host, port=port, name=name, alias=None if Path(model).exists() else model, loaded=loaded)


def run(
    load: Callable[[], AsyncLLM],
    *,
    host: str,
    port: int,
    name: str | None = None,
    alias: str | None = None,
    loaded: Callable[[], None] | None = None,
    grace_s: int = GRACE_S,
) -> None:
    """`serve` for a model that `load` makes."""
    sock = listening(host, port)
    _take_descriptors()
    failure: list[Exception] = []

    def take(outcome: AsyncLLM | Exception) -> None:
        if isinstance(outcome, Exception):
            failure.append(outcome)
            server.should_exit = True
        else:
            if loaded is not None:
                loaded()
            print(_ready_line(service.names(outcome)[0], outcome, host, sock.getsockname()[1]), flush=True)

    service = Service(load, name=name, alias=alias, loaded=take)
    server = _Server(configured(application(service, BODY_BYTES), grace_s))
    try:
        server.run(sockets=[sock])
    finally:
        sock.close()
    if failure:
        raise failure[0]


def configured(app: ASGIApp, grace_s: int) -> uvicorn.Config:
    """uvicorn as it serves us; running requests may go on for `grace_s` when it is told to stop."""
    return uvicorn.Config(
        app,
        loop="asyncio",
        http=Connection,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=grace_s,
        backlog=ACCEPTED,
    )


def _ready_line(name: str, llm: AsyncLLM, host: str, port: int) -> str:
    address = f"[{host}]" if ":" in host else host
    facts = f"model {name}, context {llm.model.context:,} tokens, threads {llm.model.threads}"
    return f"ready: http://{address}:{port}/v1 ({facts})"


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
    """uvicorn, ending in our way: a signal is an orderly end and not re-raised, a second one does not wait."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(WAITING)  # uvicorn has set it to what is accepted at once

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # then uvicorn leaves the application as it is, and logs how it is cancelled
            await self.lifespan.shutdown()

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
