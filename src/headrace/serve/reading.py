"""Reads the JSON object of a request: type, size, encoding and grammar. What its fields mean is judged elsewhere."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from starlette.datastructures import Headers
from starlette.requests import Request

from headrace.errors import RequestError
from headrace.serve.gone import Stopped
from headrace.serve.problems import Problem

DRAIN_BYTES = 2**26
"""How much of a body that is too large is read and dropped, so that the client finishes sending and sees the 413."""
DRAIN_S = 5.0
"""For how long."""
MAX_COMMAS = 2**21
"""More values than any context holds tokens: refused unparsed, so that no body takes long to parse."""
THREAD_BYTES = 2**18
"""Larger bodies are parsed in a thread."""
QUOTED = 128
"""Names and values of the client are quoted in errors up to this many characters."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_object(request: Request, limit: int) -> dict[str, Any]:
    """The request's body, of at most `limit` bytes, as an object. Problem 400, 413 or 415 says what is wrong with it;
    Stopped where the server stops before it is all there."""
    _check_type(request.headers)
    try:
        raw = await _read(request, limit)
        return parse_object(raw) if len(raw) <= THREAD_BYTES else await asyncio.to_thread(parse_object, raw)
    except asyncio.CancelledError:
        raise Stopped from None


def _check_type(headers: Headers) -> None:
    """JSON in UTF-8, not compressed. A request without a Content-Type is taken as JSON."""
    content_type = headers.get("content-type", "application/json")
    kind, *parameters = (part.strip().lower() for part in content_type.split(";"))
    if kind != "application/json":
        raise _unsupported(
            f"Content-Type must be application/json, not {content_type[:QUOTED]!r}"
            " (with curl: -H 'Content-Type: application/json')"
        )
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "charset" and value.strip(' "') not in ("utf-8", "utf8"):
            raise _unsupported(f"the charset must be utf-8, not {value[:QUOTED]!r}")
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise _unsupported(f"a body with Content-Encoding {encoding[:QUOTED]!r} is not accepted: send it plain")


def _unsupported(message: str) -> Problem:
    return Problem(415, message, code="unsupported_media_type")


async def _read(request: Request, limit: int) -> bytes:
    """The whole body, never holding more than `limit` bytes."""
    declared = request.headers.get("content-length", "")
    excess = declared.isascii() and declared.isdigit() and int(declared[:20]) > limit
    if excess and request.headers.get("expect", "").lower() == "100-continue":
        raise _too_large(limit)  # the client asked before sending: there is nothing to drain
    body = bytearray()
    received = 0
    until = time.monotonic() + DRAIN_S
    async for chunk in request.stream():
        received += len(chunk)
        if excess or received > limit:
            excess = True
            body.clear()
            if received > DRAIN_BYTES or time.monotonic() > until:
                break
        else:
            body += chunk
    if excess:
        raise _too_large(limit)
    return bytes(body)


def _too_large(limit: int) -> Problem:
    message = f"the body is larger than the {limit} bytes that this server takes"
    return Problem(413, message, code="request_too_large", headers={"Connection": "close"})


def parse_object(raw: bytes) -> dict[str, Any]:
    """Strict JSON (RFC 8259): UTF-8, one object, no NaN or Infinity, no key twice, no half of a surrogate pair."""
    if not raw.strip():
        raise _bad("the body is empty: it must be a JSON object")
    if raw.count(b",") > MAX_COMMAS:
        raise Problem(
            413, f"the body holds more than {MAX_COMMAS} commas, more values than can be used", code="request_too_large"
        )
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise _bad(f"the body is not UTF-8: byte {error.start} cannot stand there") from None
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise _bad(f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise _bad("the body is nested too deeply") from None
    except ValueError:
        raise _bad("the body is not JSON: a number has too many digits") from None
    if not isinstance(value, dict):
        raise _bad(f"the body must be a JSON object, not {quoted(value)}")
    if _SURROGATE.search(raw):
        _check_text(value)
    return value


def _bad(message: str, param: str | None = None) -> Problem:
    return Problem(400, message, param=param, code="invalid_json")


def _no_constant(name: str) -> NoReturn:
    raise _bad(f"the body is not JSON: {name} is no JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        named = twice[:QUOTED].encode("utf-8", "backslashreplace").decode()  # it may hold half of a surrogate pair
        raise _bad(f"the key {twice[:QUOTED]!r} stands twice in one object", named)
    return out


def quoted(value: Any) -> str:
    """How errors show a value of the client's JSON: lists and objects by their kind, all else as it is, unless long."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case dict():
            return "an object"
        case list():
            return "a list" if value else "an empty list"
        case str():
            return repr(value[:QUOTED]) + ("..." if len(value) > QUOTED else "")
        case int() if abs(value) >= 10**QUOTED:
            return "that large a number"
    return repr(value)


def check_keys(value: Mapping[str, Any], at: str, *keys: str, ignored: Collection[str] = ()) -> None:
    """RequestError names the first key of a client's object that is neither one of these nor `ignored`."""
    for key in value:
        if key not in keys and key not in ignored:
            raise RequestError(
                f"{at} has the unknown key {quoted(key)}; it takes {', '.join(keys)}", f"{at}.{key[:QUOTED]}"
            )


def _check_text(value: Any) -> None:
    """No string holds half of a surrogate pair, which no tokenizer and no UTF-8 can take."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case str() as text:
                if any("\ud800" <= char <= "\udfff" for char in text):
                    raise _bad("a string holds half of a surrogate pair (\\ud800 to \\udfff), which is no character")
            case list() as items:
                waiting += items
            case dict() as pairs:
                waiting += pairs
                waiting += pairs.values()
