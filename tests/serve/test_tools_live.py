"""Tools on real models, end to end: what a grammar holds is held, streamed or not, alone or beside others. A2, G1."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from headrace.engine.async_llm import AsyncLLM
from tests.constrain.drawn import faults
from tests.serve.client_checks import client_of
from tests.serve.http_api import CHAT, error_of, events_of
from tests.serve.live_server import LiveServer
from tests.serve.test_tools import NAMED, NOTHING, TOOLS

TALK = [{"role": "user", "content": "Is it warm in Bern?"}]
FORMAT = {
    "type": "json_schema",
    "json_schema": {
        "name": "x",
        "schema": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module", params=["qwen2.5-coder-0.5b", "smollm2-135m"])
def http(request: pytest.FixtureRequest, test_model: Callable[[str], Path]) -> Iterator[httpx.Client]:
    """The first has a template for tools; to the second they are described."""
    file = test_model(request.param)
    with LiveServer(lambda: AsyncLLM(file, context=2048, threads=2)) as live:
        yield httpx.Client(base_url=live.wait_ready(120).url, timeout=120)


def asked(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post(CHAT, json={"messages": TALK, "tools": TOOLS, "max_tokens": 200, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def calls(choice: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Those that are whole."""
    every = choice["message"].get("tool_calls", [])
    whole = every if choice["finish_reason"] == "tool_calls" else every[:-1]
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in whole]


def is_good(name: str, given: dict[str, Any]) -> bool:
    if name == "ping":
        return given == {}
    days = given.get("days", 0)
    return name == "get_weather" and isinstance(given["city"], str) and type(days) is int and len(given) <= 2


@pytest.mark.parametrize("temperature", [0, 1])
def test_a2_required(http: httpx.Client, temperature: float) -> None:
    for seed in range(4):
        choice = asked(http, tool_choice="required", temperature=temperature, seed=seed)
        assert choice["message"]["content"] is None
        assert choice["finish_reason"] in ("tool_calls", "length")
        assert choice["message"]["tool_calls"]
        assert all(is_good(*call) for call in calls(choice))


def test_a2_named_and_at_most_one(http: httpx.Client) -> None:
    for seed in range(3):
        how: dict[str, Any] = {"temperature": 1, "seed": seed}
        choice = asked(http, tool_choice=NAMED, **how)
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
        one = {"type": "function", "function": {"name": "ping"}}
        assert calls(asked(http, tool_choice=one, **how)) == [("ping", {})]
        several = asked(http, tool_choice="required", parallel_tool_calls=False, **how)
        assert len(several["message"]["tool_calls"]) == 1
        assert several["finish_reason"] in ("tool_calls", "length")


def test_a2_none(http: httpx.Client) -> None:
    choice = asked(http, tool_choice="none", max_tokens=16)
    assert choice["message"]["content"]
    assert "tool_calls" not in choice["message"]


def test_streamed_and_whole_agree(http: httpx.Client) -> None:
    how = {"messages": TALK, "tools": TOOLS, "tool_choice": "required", "temperature": 0.8, "seed": 3, "max_tokens": 90}
    whole = asked(http, **how)
    got: dict[int, list[str]] = {}
    finish = None
    for event in events_of(http.post(CHAT, json={**how, "stream": True})):
        for choice in event["choices"]:
            assert not choice["delta"].get("content")
            for call in choice["delta"].get("tool_calls", []):
                some = got.setdefault(call["index"], [call["function"].get("name", ""), ""])
                some[1] += call["function"]["arguments"]
            finish = choice["finish_reason"] or finish
    told = [[call["function"]["name"], call["function"]["arguments"]] for call in whole["message"]["tool_calls"]]
    assert list(got.values()) == told
    assert finish == whole["finish_reason"]


def test_together_as_alone(http: httpx.Client) -> None:
    """Beside others, held to other grammars, an answer is the same."""
    bodies = [
        {"tool_choice": "required", "temperature": 0.9, "seed": 1, "max_tokens": 60},
        {"tool_choice": NAMED, "temperature": 0.9, "seed": 2, "max_tokens": 60},
        {"tool_choice": "none", "temperature": 0.9, "seed": 3, "max_tokens": 20},
        {"tool_choice": "auto", "temperature": 0.9, "seed": 4, "max_tokens": 60},
        {"parallel_tool_calls": False, "temperature": 0.9, "seed": 5, "max_tokens": 60},
    ]

    def said(body: dict[str, Any]) -> Any:
        choice = asked(http, **body)
        return choice["message"]["content"], calls(choice), choice["finish_reason"]

    alone = [said(body) for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        assert list(pool.map(said, bodies)) == alone


def test_strict(http: httpx.Client) -> None:
    """Nothing is required; what is called is good."""
    tools = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    for seed in range(4):
        choice = asked(http, tools=tools, temperature=1, seed=seed, max_tokens=80)
        assert all(is_good(*call) for call in calls(choice))
        assert choice["message"].get("tool_calls") != []


class Weather(BaseModel):
    city: str = Field(pattern="^[A-Z]{4}$")
    """As no model would write it by itself."""


def test_functions_of_the_official_client(http: httpx.Client) -> None:
    """They are strict. What a model writes without tags is a call as well, and a good one; Qwen's for code does."""
    client = client_of(str(http.base_url).rstrip("/"))
    model = client.models.list().data[0].id
    tools = [openai.pydantic_function_tool(Weather, name="get_weather")]
    bare = 0
    for seed in range(4):
        how: dict[str, Any] = {"model": model, "messages": TALK, "tools": tools, "max_tokens": 200, "logprobs": True}
        try:
            choice = client.chat.completions.parse(**how, temperature=min(seed, 1), seed=seed).choices[0]
        except openai.LengthFinishReasonError:
            continue
        written = "".join(entry.token for entry in choice.logprobs.content)
        calls = choice.message.tool_calls or []
        assert all(isinstance(call.function.parsed_arguments, Weather) for call in calls)
        assert (choice.finish_reason == "tool_calls") is bool(calls)
        bare += bool(calls) and "<tool_call>" not in written
    assert bare or "qwen" not in model.lower()


def test_strict_calls_that_are_cut(http: httpx.Client) -> None:
    """Streamed and whole agree, with and without tags."""
    tools = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    for limit in (9, 15, 21, 80):
        how = {"messages": TALK, "tools": tools, "temperature": 0.8, "seed": 7, "n": 3, "max_tokens": limit}
        whole = http.post(CHAT, json=how).json()["choices"]
        got = [["", [], None] for _ in whole]
        for event in events_of(http.post(CHAT, json={**how, "stream": True})):
            for choice in event["choices"]:
                some = got[choice["index"]]
                some[0] += choice["delta"].get("content") or ""
                for call in choice["delta"].get("tool_calls", []):
                    some[1] += [""] * (call["index"] == len(some[1]))
                    some[1][call["index"]] += call["function"]["arguments"]
                some[2] = choice["finish_reason"] or some[2]
        for choice, (content, arguments, finish) in zip(whole, got, strict=True):
            message = choice["message"]
            written = [call["function"]["arguments"] for call in message.get("tool_calls", [])]
            assert (content, arguments, finish) == (message["content"] or "", written, choice["finish_reason"])
            assert all(is_good(*call) for call in calls(choice))


@pytest.mark.parametrize("choice", ["auto", "required", "none"])
def test_a2_with_a_response_format(http: httpx.Client, choice: str) -> None:
    """It says what content is; an answer that must have calls has none."""
    got = asked(http, tool_choice=choice, response_format=FORMAT, temperature=1, seed=5)
    if choice == "required":
        assert got["message"]["content"] is None
        assert got["message"]["tool_calls"]
    elif choice == "none" or got["message"]["content"] is not None:
        assert json.loads(got["message"]["content"]) in ({"a": 1}, {"a": 2})
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strnig"}}}
    if choice != "required":
        answer = http.post(CHAT, json={"messages": TALK, "tools": TOOLS, "tool_choice": choice, "response_format": bad})
        error_of(answer, 400)
        assert answer.json()["error"]["param"].startswith("response_format.json_schema")


def test_g1_schemas_that_trouble_others(http: httpx.Client) -> None:
    def tool(name: str, **parameters: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}

    inner = {"type": "object", "properties": {"t": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 9}}}
    tools = [
        tool("empty", properties={}),
        tool("long", properties={"t": {"type": "string", "maxLength": 8192}}, required=["t"]),
        tool("some", properties={"t": {"type": "string", "pattern": "\\S"}}, required=["t"]),
        tool("nested", properties={"o": inner}, required=["o"]),
        NOTHING,
    ]
    for one in tools:
        name = one["function"]["name"]
        choice = asked(
            http, tools=tools, tool_choice={"type": "function", "function": {"name": name}}, temperature=1, seed=1
        )
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == [name]
        assert not any(faults(one["function"].get("parameters", {}), json.dumps(given)) for _, given in calls(choice))
    schemas = {one["function"]["name"]: one["function"].get("parameters", {}) for one in tools}
    whole = 0
    for seed in range(4):
        choice = asked(http, tools=tools, tool_choice="required", temperature=1, seed=seed)
        assert choice["message"]["tool_calls"]
        for name, given in calls(choice):
            whole += 1
            assert not faults(schemas[name], json.dumps(given)), (name, given)
    assert whole


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "strnig"},
        {"type": "string", "pattern": "["},
        {"type": "array", "minItems": 3, "maxItems": 1},
        {"enum": []},
        {"$ref": "#/$defs/nowhere"},
        {"type": "array", "contains": {"type": "string"}},
    ],
)
def test_g1_schemas_that_cannot_be_held_are_named(http: httpx.Client, schema: dict[str, Any]) -> None:
    bad = {"type": "object", "properties": {"p": schema}, "required": ["p"]}
    tools = [NOTHING, {"type": "function", "function": {"name": "bad", "parameters": bad}}]
    refused = http.post(CHAT, json={"messages": TALK, "tools": tools, "tool_choice": "required"})
    error_of(refused, 400)
    assert refused.json()["error"]["param"].startswith("tools[1].function.parameters")
    free = http.post(CHAT, json={"messages": TALK, "tools": tools, "max_tokens": 4})
    assert free.status_code == 200, "where nothing is held the schema is only shown"
