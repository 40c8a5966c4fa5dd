"""Fits a conversation with tool calls to what a model's template can write. Pure functions of messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.tokenize.tools.form import Described, Form

Message = dict[str, Any]


def fitted(messages: Sequence[Message], form: Form, tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages as the form's template takes them: ids that it takes, tool results with their tool's name, one
    call a message where it takes no more; without tools in the template, tools, calls and results as text.

    Calls have `id` or not, and `function` with `name` and `arguments`, an object.
    """
    out = _named([dict(message) for message in messages])
    if form.described is not None:
        return _described(out, form.described, tools)
    if form.fit_id is not None:
        out = [_with_ids(message, form.fit_id) for message in out]
    return _one_by_one(out) if form.single else out


def _named(messages: list[Message]) -> list[Message]:
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            if "id" in call:
                names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and "name" not in message:
            name = names.get(message.get("tool_call_id", ""))
            if name is not None:
                message["name"] = name
    return messages


def _with_ids(message: Message, fit: Callable[[str], str]) -> Message:
    out = dict(message)
    if "tool_calls" in out:
        calls = enumerate(out["tool_calls"])
        out["tool_calls"] = [{**call, "id": fit(call.get("id", str(i)))} for i, call in calls]
    if out["role"] == "tool":
        out["tool_call_id"] = fit(out.get("tool_call_id", ""))
    return out


def _one_by_one(messages: list[Message]) -> list[Message]:
    """Several calls of one message as messages of one call, each before its result."""
    out: list[Message] = []
    waiting: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            if waiting:
                out.append(waiting.pop(_asked(waiting, message.get("tool_call_id"))))
        else:
            out += waiting
            waiting = []
        calls = message.get("tool_calls", ())
        if len(calls) <= 1:
            out.append(message)
            continue
        first = {**message, "tool_calls": [calls[0]]}
        others = [{"role": message["role"], "content": "", "tool_calls": [call]} for call in calls[1:]]
        waiting = [first, *others]
    return [*out, *waiting]


def _asked(waiting: Sequence[Message], call: str | None) -> int:
    """Which of the messages, of one call each, has this call; the first where none has."""
    ids = [message["tool_calls"][0].get("id") for message in waiting]
    return ids.index(call) if call in ids else 0


def _described(messages: list[Message], described: Described, tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    out: list[Message] = []
    results: list[tuple[str, str]] = []
    for message in [*messages, None]:
        if message is not None and message["role"] == "tool":
            results.append((message.get("name", ""), _text(message["content"])))
            continue
        if results:
            answer = {"role": "user", "content": described.results(results)}
            results = []
            if message is not None and message["role"] == "user":
                message = {**message, "content": _joined(answer["content"], message["content"])}
            else:
                out.append(answer)
        if message is not None:
            out.append(_without_calls(message, described))
    return _introduced(out, described, tools) if tools else out


def _without_calls(message: Message, described: Described) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = described.calls([call["function"] for call in calls])
    said = _text(message["content"])
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": f"{said}\n{written}" if said else written}


def _introduced(messages: list[Message], described: Described, tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    text = described.tools(tools)
    first, *others = messages
    if first["role"] == "system":
        return [{**first, "content": f"{_text(first['content'])}\n\n{text}"}, *others]
    if described.in_first_message and first["role"] == "user":
        return [{**first, "content": _joined(text, first["content"])}, *others]
    return [{"role": "system", "content": text}, *messages]


def _text(content: Any) -> str:
    """Of a content that was judged."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _joined(text: str, content: Any) -> Any:
    if isinstance(content, str):
        return f"{text}\n\n{content}"
    return [{"type": "text", "text": text}, *content]
