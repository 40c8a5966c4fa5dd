"""How answers are written as bytes: JSON and server-sent events. Pure functions."""

from __future__ import annotations

import json
from typing import Any

LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
"""Characters that JSON allows in strings but that many clients' line readers split at."""

LEAST_LOGPROB = -9999.0
"""JSON has no -Infinity; OpenAI writes this for a token that cannot be chosen."""

DONE = b"data: [DONE]\n\n"
"""The last event of a stream that ended well."""


def as_json(value: Any) -> bytes:
    """Compact UTF-8 JSON. ValueError where a number is not finite: the callers write only numbers that are."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def as_event(value: Any) -> bytes:
    """One server-sent event (https://html.spec.whatwg.org/multipage/server-sent-events.html), on one line."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(LINE_ENDS)
    return f"data: {text}\n\n".encode()


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, LEAST_LOGPROB)
