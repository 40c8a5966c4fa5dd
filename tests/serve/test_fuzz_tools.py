"""Random faults in chats with tools, and random answers to them: never a 500, never an empty list of calls."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from tests.fuzz.http_bodies import CHAT, any_value
from tests.serve.http_api import Api

ROUNDS = 400
"""Bodies for each template."""

TOOL_CHAT: dict[str, Any] = {
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "f",
                "description": "d",
                "strict": True,
                "parameters": {
                    "type": "object",
                    "properties": {"a": {"type": ["string", "null"], "enum": ["x", None]}, "b": {"type": "array"}},
                    "required": ["a"],
                },
            },
        },
        {"type": "function", "function": {"name": "g"}},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "messages": [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "r"},
    ],
    "max_tokens": 60,
}
TEMPLATES = (
    "{{ tools }}<tool_call>",
    "{{ tools }}[TOOL_CALLS][ARGS]",
    "{{ tools }}[TOOL_CALLS]",
    '{{ tools }}<|start_header_id|>"parameters"',
    "{{ tools }}<start_function_call>",
    "plain",
    "<start_of_turn>",
)
SAID = (
    "<tool_call>",
    "</tool_call>",
    '{"name": "f", "arguments": {',
    "}",
    "}}",
    "[TOOL_CALLS]",
    "f[ARGS]{",
    "\\",
    '"',
    "é",
)


def replaced(rng: random.Random, value: Any) -> Any:
    """The same, with one thing in it another."""
    if rng.random() < 0.2 or not isinstance(value, dict | list) or not value:
        return any_value(rng)
    if isinstance(value, dict):
        key = rng.choice(sorted(value))
        if rng.random() < 0.15:
            return {rng.choice(["anyOf", "minItems", "items", "$ref", "x", key + "x"]): any_value(rng), **value}
        return {**value, key: replaced(rng, value[key])}
    at = rng.randrange(len(value))
    return [*value[:at], replaced(rng, value[at]), *value[at + 1 :]]


@pytest.mark.parametrize("template", TEMPLATES)
def test_fuzz_tools(api: Api, template: str) -> None:
    rng = random.Random(template)
    api.llm.tokenizer.learn(template, control=["[TOOL_CALLS]"], text=["<tool_call>", "<think>", "</think>"])
    chat = api.llm.tokenizer.chat
    api.llm.tokenizer.chat = lambda messages, **how: chat([{"role": "user", "content": "hi"}])  # type: ignore
    statuses: Counter[int] = Counter()
    try:
        for _ in range(ROUNDS):
            body = TOOL_CHAT | {"tool_choice": rng.choice(["auto", "required"]), "stream": rng.random() < 0.5}
            body = replaced(rng, body) if rng.random() < 0.9 else body
            api.llm.says("".join(rng.choice(SAID) for _ in range(rng.randrange(9))))
            response = api.http.post(CHAT, json=body)
            statuses[response.status_code] += 1
            assert response.status_code in (200, 400, 404), (response.status_code, body)
            if response.status_code != 200:
                assert len(response.json()["error"]["message"]) < 2000
            elif response.headers["content-type"].startswith("text/event-stream"):
                assert response.content.endswith(b"data: [DONE]\n\n"), body
            else:
                assert all(c["message"].get("tool_calls") != [] for c in response.json()["choices"])
    finally:
        del api.llm.tokenizer.chat
    assert min(statuses[200], statuses[400]) > ROUNDS / 10, statuses
