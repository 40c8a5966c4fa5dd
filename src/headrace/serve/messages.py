"""Judges the messages of a chat as HTTP takes them: roles, keys, what is not served yet. Pure functions.

What holds for every chat (text parts, the form that templates read) is the tokenizer's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from headrace.errors import RequestError
from headrace.serve.fields import CACHE_HINT
from headrace.serve.reading import QUOTED, check_keys, quoted
from headrace.tokenize.messages import plain

ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""Role in the body to role in the template: `developer` is OpenAI's newer word for what open models call `system`."""

IGNORED = ("annotations", "parsed", CACHE_HINT)
"""What a client may send back from an earlier answer and what cannot matter (OpenAI's own adds what it parsed), and a
hint for the speed only."""
IGNORED_IN_FUNCTIONS = ("parsed_arguments",)
TAKEN = {"assistant": ("tool_calls", "reasoning_content"), "tool": ("tool_call_id",)}
"""Keys of a message besides role, content and name, by role."""
REFUSED: Mapping[str, str] = {
    "tool_calls": "only the assistant calls tools",
    "function_call": "use tool_calls",
    "audio": "audio is not supported",
    "refusal": "refusals are not supported: send the text as content",
    "reasoning": "only the assistant thinks",
    "reasoning_content": "only the assistant thinks",
}
"""Keys of a message that are refused, the assistant's own from others, unless they are null or an empty list."""


MALFORMED = "malformed_arguments"
"""What arguments that are no JSON object are called when they are sent back to the model."""


PARTS: Mapping[str, str] = {
    "image_url": "images are not supported",
    "image": "images are not supported",
    "input_image": "images are not supported",
    "input_audio": "audio is not supported",
    "audio_url": "audio is not supported",
    "video_url": "videos are not supported",
    "video": "videos are not supported",
    "file": "files are not supported: send their text",
    "input_file": "files are not supported: send their text",
    "refusal": "refusals are not supported: send the text as a text part",
}
"""Kinds of content parts that clients send and that are refused by name; any other but `text` is unknown."""


def conversation(messages: Sequence[Any], *, continues: bool) -> list[dict[str, Any]]:
    """Messages with `role`, `content` and, where given, `name`, `tool_call_id`, `reasoning_content`: strings, or parts
    as content; and `tool_calls`, with their arguments as objects.

    `continues`: the answer goes on with the last message. RequestError names the message and the key,
    "messages[2].content[0].type".
    """
    if not messages:
        raise RequestError("messages must hold at least one message", "messages")
    out = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if continues and out[-1]["role"] != "assistant":
        raise RequestError(
            f"continue_final_message needs a last message of the assistant, not of the {out[-1]['role']}",
            "continue_final_message",
        )
    return out


def _message(message: Any, at: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError(f"{at} must be an object with role and content", at)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(f"{at}.role must be one of {', '.join(ROLES)}, not {quoted(role)}", f"{at}.role")
    out: dict[str, Any] = {"role": ROLES[role]}
    for key, value in message.items():
        match key:
            case "role" | "content":
                pass
            case "name":
                if value is not None:
                    out[key] = _string(value, f"{at}.name")
            case "tool_calls" if role == "assistant":
                if value:
                    out[key] = _calls(value, f"{at}.tool_calls")
            case "reasoning_content" | "reasoning" if role == "assistant":
                if value is not None:
                    out["reasoning_content"] = _string(value, f"{at}.{key}")
            case "tool_call_id" if role == "tool":
                if value is not None:
                    out[key] = _string(value, f"{at}.tool_call_id")
            case _ if key in IGNORED or value is None:
                pass
            case _ if key in REFUSED:
                if value != []:
                    raise RequestError(f"{at}.{key} is refused: {REFUSED[key]}", f"{at}.{key}")
            case _:
                takes = ", ".join(("role", "content", "name", *TAKEN.get(role, ())))
                raise RequestError(
                    f"{at} has the unknown key {quoted(key)}; one of role {role} takes {takes}", f"{at}.{key[:QUOTED]}"
                )
    content = message.get("content")
    if content is None and (role == "tool" or "tool_calls" in out or "reasoning_content" in out):
        content = ""
    out["content"] = _content(content, f"{at}.content")
    return out


def _calls(calls: Any, at: str) -> list[dict[str, Any]]:
    """`id` where there is one, and `function` with name and arguments, an object."""
    if not isinstance(calls, list):
        raise RequestError(f"{at} must be a list, not {quoted(calls)}", at)
    return [_call(call, f"{at}[{i}]") for i, call in enumerate(calls)]


def _call(call: Any, at: str) -> dict[str, Any]:
    if not isinstance(call, dict) or call.get("type") not in (None, "function"):
        raise RequestError(f"{at} must be an object of type function with a function", at)
    check_keys(call, at, "id", "type", "function", "index")
    function, inside = call.get("function"), f"{at}.function"
    if not isinstance(function, dict):
        raise RequestError(f"{inside} must be an object with name and arguments, not {quoted(function)}", inside)
    check_keys(function, inside, "name", "arguments", ignored=IGNORED_IN_FUNCTIONS)
    if not _string(function.get("name"), f"{inside}.name"):
        raise RequestError(f"{inside}.name must not be empty", f"{inside}.name")
    arguments = _arguments(function.get("arguments"), f"{inside}.arguments")
    out = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return out if call.get("id") is None else {"id": _string(call["id"], f"{at}.id"), **out}


def _arguments(given: Any, at: str) -> dict[str, Any]:
    """An object. Models write arguments that are none, clients send them back, and the talk must go on: what a string
    holds else is kept as the text under `MALFORMED`, and nothing, or null, is no arguments."""
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    value = given
    if isinstance(given, str):
        try:
            value = json.loads(given, parse_constant=_no_number)
        except (ValueError, RecursionError):
            return {MALFORMED: given}
        if value is None:
            return {}
        if not isinstance(value, dict):
            return {MALFORMED: given}
    if not isinstance(value, dict):
        raise RequestError(f"{at} must be an object, or one as JSON in a string, not {quoted(given)}", at)
    copy: dict[str, Any] = plain(value, at)
    return copy


def _no_number(name: str) -> NoReturn:
    raise ValueError(name)


def _content(content: Any, at: str) -> str | list[Any]:
    """As it stands; that parts are text parts is the tokenizer's to judge, for the Python API has them too."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise RequestError(f"{at} must be a string or a list of text parts, not {quoted(content)}", at)
    return [_part(part, f"{at}[{i}]") for i, part in enumerate(content)]


def _part(part: Any, at: str) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in PARTS:
        raise RequestError(f"{at} of type {kind} is refused: {PARTS[kind]}", f"{at}.type")
    if kind != "text":
        return part
    check_keys(part, at, "type", "text", ignored=(CACHE_HINT,))
    return {key: value for key, value in part.items() if key != CACHE_HINT}


def _string(value: Any, at: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{at} must be a string, not {quoted(value)}", at)
    return value
