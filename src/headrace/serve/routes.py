"""The ASGI application: paths, health, errors, request ids. Knows nothing of sockets and signals."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import uuid
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.errors import EngineDeadError, OverloadedError, RequestError
from headrace.serve.embedding import Embeddings
from headrace.serve.generating import Endpoints
from headrace.serve.gone import Stopped
from headrace.serve.openapi import document
from headrace.serve.problems import Problem, answer_problem
from headrace.serve.service import Service
from headrace.serve.tokenizing import Tokenizing
from headrace.serve.written import as_json

_log = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
_PROBLEMS = (Problem, RequestError, OverloadedError, EngineDeadError, Stopped, HTTPException, Exception)
_GOOD_ID = re.compile(rb"[\x21-\x7e]{1,128}")


def application(service: Service, body_bytes: int) -> ASGIApp:
    """All paths over one service. Errors of every kind are answered in OpenAI's form."""
    endpoints = Endpoints(service, body_bytes)
    embeddings = Embeddings(service, body_bytes, endpoints.tenant)
    tokenizing = Tokenizing(service, body_bytes)

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

    @functools.cache
    def described() -> bytes:
        return as_json(document(version("headrace")))

    async def openapi(request: Request) -> Response:
        return Response(described(), media_type="application/json")

    app = Starlette(
        routes=[
            Route("/live", live),
            Route("/health", health),
            Route("/openapi.json", openapi),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
            Route("/v1/completions", endpoints.completions, methods=["POST"]),
            Route("/v1/embeddings", embeddings.answer, methods=["POST"]),
            Route("/tokenize", tokenizing.tokenize, methods=["POST"]),
            Route("/detokenize", tokenizing.detokenize, methods=["POST"]),
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
