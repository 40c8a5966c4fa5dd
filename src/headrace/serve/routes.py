"""The ASGI application: paths, health, metrics, errors, request ids. Knows nothing of sockets and signals."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import uuid
from collections.abc import AsyncIterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.errors import EngineDeadError, OverloadedError, RequestError
from headrace.serve.access import Access
from headrace.serve.embedding import Embeddings
from headrace.serve.generating import Endpoints
from headrace.serve.gone import Stopped
from headrace.serve.keys import Keys
from headrace.serve.limits import KeyLimits
from headrace.serve.metrics import LagSampler, Metrics
from headrace.serve.openapi import document
from headrace.serve.options import ServerOptions
from headrace.serve.problems import Problem, problem_of, stopping
from headrace.serve.service import Service
from headrace.serve.tokenizing import Tokenizing
from headrace.serve.visits import Visit, Visits, visit_of
from headrace.serve.written import as_json

_log = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
EXPOSED = (
    REQUEST_ID,
    "retry-after",
    *(f"x-ratelimit-{what}-{kind}" for what in ("limit", "remaining", "reset") for kind in ("requests", "tokens")),
)
"""Headers that pages of other origins may read."""
_PROBLEMS = (Problem, RequestError, OverloadedError, EngineDeadError, Stopped, HTTPException, Exception)
_GOOD_ID = re.compile(rb"[\x21-\x7e]{1,128}")


def application(service: Service, options: ServerOptions) -> Application:
    """All paths over one service. Errors of every kind are answered in OpenAI's form. OptionError where the file of API
    keys cannot be used."""
    endpoints = Endpoints(service, options.body_bytes)
    embeddings = Embeddings(service, options.body_bytes)
    tokenizing = Tokenizing(service, options.body_bytes)
    numbers = Metrics()

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        sampler = LagSampler(numbers.lag)
        service.start()
        try:
            yield
        finally:
            sampler.stop()
            service.close()

    async def metrics(request: Request) -> Response:
        body, content_type = numbers.exposition(service.now, request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

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
            Route("/openapi.json", _openapi),
            Route("/metrics", metrics),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
            Route("/v1/completions", endpoints.completions, methods=["POST"]),
            Route("/v1/embeddings", embeddings.answer, methods=["POST"]),
            Route("/tokenize", tokenizing.tokenize, methods=["POST"]),
            Route("/detokenize", tokenizing.detokenize, methods=["POST"]),
            Route("/tokenizer_info", tokenizing.info),
        ],
        exception_handlers=dict.fromkeys(_PROBLEMS, answer_problem) | {ClientDisconnect: _nobody_reads},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return _guarded(app, numbers, options)


@functools.cache
def _described() -> bytes:
    return as_json(document(version("headrace")))


async def _openapi(request: Request) -> Response:
    return Response(_described(), media_type="application/json")


def _guarded(app: Starlette, numbers: Metrics, options: ServerOptions) -> Application:
    """What stands around the application, from the outside in: request ids and the end of each request, CORS, keys."""
    keys = Keys(options.api_key, None if options.api_key_file is None else Path(options.api_key_file).expanduser())
    limits = KeyLimits()
    paths = {route.path for route in app.routes if isinstance(route, Route) and "{" not in route.path}
    visits = Visits(numbers, limits, texts=options.log_texts, unread_tokens=options.unread_tokens, paths=paths)
    inner: ASGIApp = Access(app, keys, limits, open_metrics=options.open_metrics)
    if options.cors_origin:
        inner = CORSMiddleware(
            inner,
            allow_origins=options.cors_origin,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),  # clients in browsers send some of their own
            expose_headers=EXPOSED,
        )
    return Application(inner, visits, app.routes)


async def answer_problem(request: Request, error: Exception) -> Response:
    """Starlette's handler for every kind of error."""
    problem = problem_of(error)
    visit_of(request.scope).refused(problem)
    return problem.response()


def _json(value: Any) -> Response:
    return Response(as_json(value), media_type="application/json")


async def _nobody_reads(request: Request, error: Exception) -> Response:
    """The client has left; 499 as nginx counts it, for whatever stands between."""
    return Response(status_code=499)


class Application:
    """Around all others. Every answer carries `x-request-id`: the client's, where it is printable and short, else a new
    one. An unexpected failure is logged, and the connection of one that was answered (with a 500) stays open. One that
    is cancelled, as a server that stops does it, is answered with 503 where that is still possible.
    """

    def __init__(self, app: ASGIApp, visits: Visits, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self.visits = visits
        self.routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(REQUEST_ID.encode(), b"")
        visit = self.visits.begin(scope, given.decode() if _GOOD_ID.fullmatch(given) else uuid.uuid4().hex)
        try:
            await self._answer(visit, scope, receive, send)
        finally:
            self.visits.end(visit)

    async def _answer(self, visit: Visit, scope: Scope, receive: Receive, send: Send) -> None:
        answered = False

        async def noted(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = visit.request_id
                headers.update(visit.headers())
            else:
                answered = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except asyncio.CancelledError:
            if visit.status is None:
                visit.refused(stopping())
                await stopping().response()(scope, receive, noted)
        except Exception:
            if not answered:
                raise
            _log.exception("request %s failed", visit.request_id)
