"""LiteLLM against a live server: URL MODEL as arguments. Ends with 0 where everything holds."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

URL, MODEL = sys.argv[1:]
HOW: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "max_retries": 0}
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}}]


def chat() -> None:
    answer = litellm.completion(messages=ASK, max_tokens=12, temperature=0, **HOW)
    assert answer.choices[0].message.content
    parts = litellm.completion(messages=ASK, max_tokens=12, temperature=0, stream=True, **HOW)
    assert "".join(p.choices[0].delta.content or "" for p in parts) == answer.choices[0].message.content


def tools() -> None:
    answer = litellm.completion(messages=ASK, tools=TOOLS, tool_choice="required", max_tokens=200, **HOW)
    (call, *_) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments).keys() == {"city", "warm"}
    parts = list(
        litellm.completion(messages=ASK, tools=TOOLS, tool_choice="required", max_tokens=200, stream=True, **HOW)
    )
    whole = litellm.stream_chunk_builder(parts)
    assert json.loads(whole.choices[0].message.tool_calls[0].function.arguments).keys() == {"city", "warm"}


def schema() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    answer = litellm.completion(messages=ASK, response_format=form, max_tokens=200, **HOW)
    assert json.loads(answer.choices[0].message.content).keys() == {"city", "warm"}


def embeddings() -> None:
    answer = litellm.embedding(input=["one", "two"], encoding_format="float", **HOW)
    assert [one["index"] for one in answer.data] == [0, 1]


def logprobs() -> None:
    answer = litellm.completion(messages=ASK, max_tokens=4, logprobs=True, top_logprobs=2, **HOW)
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


def errors() -> None:
    try:
        litellm.completion(messages=ASK, temperature=-1, **HOW)
    except litellm.BadRequestError:
        return
    raise AssertionError("a bad temperature was taken")


for check in (chat, tools, schema, embeddings, logprobs, errors):
    check()
    print(f"LiteLLM, {check.__name__}: held")
