"""Brings the messages of a chat from OpenAI's form into the one that templates read. Pure functions of plain data."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import RequestError

DEPTH = 64
"""Most objects and lists within one another."""

_ROLE = re.compile(r"[A-Za-z][\w.-]{0,63}", re.ASCII)
_REASONING = ("reasoning_content", "thinking", "reasoning")


def conversation(messages: Any, *, parts: bool) -> list[dict[str, Any]]:
    """Fresh copies of the messages, as templates expect them: keys that are null left out, arguments of tool calls as
    objects, reasoning under each name that templates know, and content a string.

    `parts`: the template goes through the parts of a content by itself; lists of text parts are left to it. Otherwise
    their texts are joined by line ends. RequestError names the message and the key, "messages[2].content[0].type".
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise RequestError("messages must be a list of messages", "messages")
    if not messages:
        raise RequestError("messages must hold at least one message", "messages")
    return [_message(message, f"messages[{i}]", parts) for i, message in enumerate(messages)]


def plain(value: Any, at: str, depth: int = DEPTH) -> Any:
    """A copy of JSON-like data in Python's own types; RequestError, naming the place, for anything else."""
    if depth < 0:
        raise RequestError(f"{at} is nested too deeply", at)
    match value:
        case None | bool():
            return value
        case str():
            text = str(value)
            check_text(text, at)
            return text
        case int():
            return int(value)
        case float():
            return float(value)
        case Mapping():
            return {_key(k, at): plain(v, f"{at}.{str(k)[:64]}", depth - 1) for k, v in value.items()}
        case list() | tuple():
            return [plain(v, f"{at}[{i}]", depth - 1) for i, v in enumerate(value)]
    raise RequestError(f"{at} must be plain data (text, numbers, lists, objects), not {type(value).__name__}", at)


def check_text(text: str, at: str) -> None:
    """RequestError where the text holds half of a surrogate pair, which stands for no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise RequestError(
            f"{at} holds half of a surrogate pair ({half}, at {error.start}), which is no character", at
        ) from None


def _key(key: Any, at: str) -> str:
    if not isinstance(key, str):
        raise RequestError(f"{at} has the key {key!r}, which is not a string", at)
    check_text(key, at)
    return str(key)


def _message(message: Any, at: str, parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{at} must be an object with role and content, not {type(message).__name__}", at)
    out = {key: value for key, value in plain(message, at).items() if value is not None}
    role = out.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise RequestError(f"{at}.role must be a name such as user, not {role!r}", f"{at}.role")
    if "content" in out:
        out["content"] = _content(out["content"], f"{at}.content", parts)
    if "tool_calls" in out:
        out["tool_calls"] = _tool_calls(out["tool_calls"], f"{at}.tool_calls")
    reasoning = next((out[key] for key in _REASONING if key in out), None)
    if reasoning is not None:
        out = {"thinking": reasoning, **out, "reasoning_content": reasoning}
    return out


def _content(content: Any, at: str, parts: bool) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{at} must be a string or a list of text parts, not {type(content).__name__}", at)
    texts = [_part(part, f"{at}[{i}]") for i, part in enumerate(content)]
    return content if parts else "\n".join(texts)


def _part(part: Any, at: str) -> str:
    if not isinstance(part, dict):
        raise RequestError(f'{at} must be an object such as {{"type": "text", "text": "..."}}', at)
    if part.get("type") != "text":
        raise RequestError(f"{at}.type must be text, not {part.get('type')!r}", f"{at}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{at}.text must be a string, not {type(text).__name__}", f"{at}.text")
    return text


def _tool_calls(calls: Any, at: str) -> list[Any]:
    if not isinstance(calls, list):
        raise RequestError(f"{at} must be a list, not {type(calls).__name__}", at)
    for i, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{at}[{i}] must be an object with function.name", f"{at}[{i}]")
        if isinstance(arguments := function.get("arguments"), str):
            function["arguments"] = _arguments(arguments, f"{at}[{i}].function.arguments")
    return calls


def _arguments(text: str, at: str) -> dict[str, Any]:
    """OpenAI sends a tool call's arguments as JSON in a string; templates want the object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{at} must be a JSON object in a string: {error}", at) from None
    if not isinstance(value, dict):
        raise RequestError(f"{at} must be a JSON object in a string, not {text[:64]!r}", at)
    copy: dict[str, Any] = plain(value, at)
    return copy
