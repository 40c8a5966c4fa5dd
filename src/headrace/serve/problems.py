"""HTTP errors in OpenAI's form, `{"error": {"message", "type", "param", "code"}}`. Knows no routes and no engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from headrace.errors import EngineDeadError, OverloadedError, RequestError, UnreadError
from headrace.serve.gone import Stopped
from headrace.serve.written import as_json

RETRY_AFTER_S = 2
"""What a 503 suggests to wait before the next try."""

MESSAGE = 1000
"""Longest message, in characters."""


class Problem(Exception):
    """A request that ends with an HTTP error. `code` is for programs, the message for people."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """What the client reads, in a response or as the last event of a stream."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(as_json(self.body()), self.status, self.headers, media_type="application/json")


def unavailable(message: str, code: str, *, retry: bool) -> Problem:
    """503; with `retry` the client is told to come back."""
    headers = {"Retry-After": str(RETRY_AFTER_S)} if retry else {}
    return Problem(503, message, kind="service_unavailable_error", code=code, headers=headers)


def overloaded(error: OverloadedError) -> Problem:
    """429, and when to come back."""
    headers = {"Retry-After": str(error.retry_s)}
    return Problem(429, str(error), kind="rate_limit_error", code="queue_full", headers=headers)


def over_limit(message: str, retry_s: int) -> Problem:
    """429: an API key is over one of its limits, and when to come back."""
    headers = {"Retry-After": str(retry_s)}
    return Problem(429, message, kind="rate_limit_error", code="rate_limit_exceeded", headers=headers)


def unauthorized(message: str) -> Problem:
    """401: no API key, or none that counts here."""
    headers = {"WWW-Authenticate": "Bearer"}
    return Problem(401, message, kind="authentication_error", code="invalid_api_key", headers=headers)


def failed(message: str) -> Problem:
    """500: an accepted request that could not be finished."""
    return Problem(500, message, kind="server_error", code="internal_error")


def timed_out() -> Problem:
    """408: it took longer than it was given. Clients that repeat such requests by themselves are told not to."""
    message = "the request took longer than the time it was given (timeout_s)"
    return Problem(408, message, kind="timeout_error", code="timeout", headers={"x-should-retry": "false"})


def stopping() -> Problem:
    """503: the server takes nothing new, or could not finish in the time it had."""
    return unavailable("the server is stopping", "stopping", retry=False)


def problem_of(error: Exception) -> Problem:
    """How an error looks over HTTP; one that was not raised on purpose is a 500 without its inner details."""
    match error:
        case Problem():
            return error
        case RequestError():
            return Problem(400, _shortened(str(error)), param=error.param, code="invalid_value")
        case OverloadedError():
            return overloaded(error)
        case EngineDeadError():
            return unavailable(f"the engine has stopped: {error}", "engine_dead", retry=False)
        case UnreadError():
            return Problem(408, str(error), code="read_too_slowly")
        case Stopped():
            return stopping()
        case HTTPException(status_code=404):
            return Problem(404, "no such path; /openapi.json has them all", code="not_found")
        case HTTPException(status_code=405):
            allow = (error.headers or {}).get("Allow", "")
            message = f"this path takes {allow}" if allow else "this path does not take that method"
            return Problem(405, message, code="method_not_allowed", headers=error.headers)
        case HTTPException():
            return Problem(error.status_code, error.detail, headers=error.headers)
    return failed("an unexpected failure inside the server; its log has the details")


def _shortened(message: str) -> str:
    """Messages may quote what the client sent, however long."""
    return message if len(message) <= MESSAGE else message[:MESSAGE] + "..."
