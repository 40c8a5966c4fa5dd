"""The ASGI application and the process around it: routes, health, errors, signals."""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import socket
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.errors import EngineDeadError, OptionError, RequestError
from headrace.serve.generating import Endpoints
from headrace.serve.gone import Stopped
from headrace.serve.problems import Problem, answer_problem
from headrace.serve.reading import BODY_BYTES
from headrace.serve.service import Service
from headrace.serve.written import as_json

if TYPE_CHECKING:
    from headrace.engine.llm import AsyncLLM
    from headrace.loading.progress import Progress

_log = logging.getLogger(__name__)

GRACE_S = 10
"""How long running requests may go on when the server is told to stop."""
REQUEST_ID = "x-request-id"
_PROBLEMS = (Problem, RequestError, EngineDeadError, Stopped, HTTPException, Exception)
_GOOD_ID = re.compile(rb"[\x21-\x7e]{1,128}")


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
    return _app(Service(load, name=name), body_bytes)


def serve(
    model: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> None:
    """Serve a model until SIGINT or SIGTERM, then return. `options` are those of `LLM`, flat; `name` is what clients
    call the model, by default what it calls itself, or `model` where that is a name and no file.

    Prints one line when it is ready. Raises OptionError where the address cannot be used, and what `LLM` raises where
    the model cannot be loaded.
    """

    def load() -> AsyncLLM:
        from headrace.engine.llm import AsyncLLM

        return AsyncLLM(model, progress=progress, **(options or {}))

    run(load, host=host, port=port, name=name, alias=None if Path(model).exists() else model)


def run(
    load: Callable[[], AsyncLLM],
    *,
    host: str,
    port: int,
    name: str | None = None,
    alias: str | None = None,
    grace_s: int = GRACE_S,
) -> None:
    """`serve` for a model that `load` makes."""
    sock = _listen(host, port)
    failure: list[Exception] = []

    def loaded(outcome: AsyncLLM | Exception) -> None:
        if isinstance(outcome, Exception):
            failure.append(outcome)
            server.should_exit = True
        else:
            print(_ready_line(service.names(outcome)[0], outcome, host, sock.getsockname()[1]), flush=True)

    service = Service(load, name=name, alias=alias, loaded=loaded)
    config = uvicorn.Config(
        _app(service, BODY_BYTES),
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=grace_s,
    )
    server = _Server(config)
    try:
        server.run(sockets=[sock])
    finally:
        sock.close()
    if failure:
        raise failure[0]


def _ready_line(name: str, llm: AsyncLLM, host: str, port: int) -> str:
    address = f"[{host}]" if ":" in host else host
    facts = f"model {name}, context {llm.model.context:,} tokens, threads {llm.model.threads}"
    return f"ready: http://{address}:{port}/v1 ({facts})"


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket: taken before anything is loaded, so that a wrong address is told at once."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, OverflowError) as error:
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


class _Server(uvicorn.Server):
    """uvicorn, ending in our way: a signal is an orderly end and not re-raised, a second one does not wait."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True

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


def _app(service: Service, body_bytes: int) -> ASGIApp:
    endpoints = Endpoints(service, body_bytes)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            service.close()

    async def live(request: Request) -> Response:
        return _json({"status": "alive"})

    async def health(request: Request) -> Response:
        service.model()
        return _json({"status": "ready"})

    async def models(request: Request) -> Response:
        llm = service.model()
        return _json({"object": "list", "data": [service.described(name, llm) for name in service.names(llm)]})

    async def one_model(request: Request) -> Response:
        llm = service.model()
        return _json(service.described(service.require(request.path_params["name"], llm), llm))

    app = Starlette(
        routes=[
            Route("/live", live),
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
            Route("/v1/completions", endpoints.completions, methods=["POST"]),
        ],
        exception_handlers=dict.fromkeys(_PROBLEMS, answer_problem) | {ClientDisconnect: _nobody_reads},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return _Outermost(app)


def _json(value: Any) -> Response:
    return Response(as_json(value), media_type="application/json")


async def _nobody_reads(request: Request, error: Exception) -> Response:
    """The client has left; 499 as nginx counts it, for whatever stands between."""
    return Response(status_code=499)


class _Outermost:
    """Around the application. Every answer carries `x-request-id`: the client's, where it is printable and short, else
    a new one. An unexpected failure is logged, and the connection of one that was answered (with a 500) stays open.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(REQUEST_ID.encode(), b"")
        request_id = given.decode() if _GOOD_ID.fullmatch(given) else uuid.uuid4().hex
        answered = False

        async def noted(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            else:
                answered = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception:
            if not answered:
                raise
            _log.exception("request %s failed", request_id)
