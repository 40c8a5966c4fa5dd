"""Thousands of random and mutated bodies: the answer is never a 500, and a plain request is served afterwards."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import httpx
import pytest

from headrace.serve.app import create_app
from headrace.serve.bodies import ChatBody, CompletionBody
from headrace.serve.fields import CHAT as CHAT_REFUSED
from headrace.serve.fields import COMPLETIONS as COMPLETIONS_REFUSED
from headrace.serve.fields import IGNORED
from headrace.serve.messages import ROLES
from tests.serve.fake_llm import FakeLLM
from tests.serve.http_api import CHAT, COMPLETIONS, Api

ROUNDS = 1500
"""Bodies for each endpoint and way."""

# fmt: off
SCALARS: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 16, 511, 2**31, 2**63, -(2**64), 10**300, 0.0, -0.0, 0.5, 1.0, 1e-320, 1e308,
    -7.25, "", "x", "hi there", "\x00", "\u2028", "😀", "é" * 50, "<|turn|>", "NaN", "0.7", "user", "assistant", "text",
    "length", "x" * 5000,
]
# fmt: on
NAMES = sorted(
    {
        *ChatBody.model_fields,
        *CompletionBody.model_fields,
        *CHAT_REFUSED,
        *COMPLETIONS_REFUSED,
        *IGNORED,
        "",
        "foo",
        "Model",
    }
)
GOOD: dict[str, list[Any]] = {
    "n": [1, 2, 3],
    "temperature": [0, 0.5, 1],
    "max_tokens": [1, 4, None],
    "max_completion_tokens": [2, None],
    "stop": ["x", ["a", "MONDAY"], None, []],
    "stream": [True, False],
    "stream_options": [{"include_usage": True}, {}, None],
    "logprobs": [True, False, 0, 1, 5, None],
    "top_logprobs": [0, 2, None],
    "echo": [True, False],
    "logit_bias": [{}, {"5": 1}, {"299": -100.0}],
    "seed": [0, 7, -3],
    "stop_token_ids": [[], [5], [257]],
    "min_tokens": [0, 1],
    "model": ["fake-model", None],
}


PLAIN: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "é 😀"}], "max_tokens": 2, "logprobs": True, "top_logprobs": 1},
    COMPLETIONS: {"prompt": "é 😀", "max_tokens": 2, "echo": True, "logprobs": 1, "stop": ["x"]},
}


def any_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if depth > 3 or kind < 0.6:
        return rng.choice(SCALARS)
    if kind < 0.8:
        return [any_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {str(rng.choice([*NAMES, *map(str, range(5))])): any_value(rng, depth + 1) for _ in range(rng.randrange(4))}


def any_message(rng: random.Random) -> Any:
    if rng.random() < 0.1:
        return any_value(rng)
    content: Any = rng.choice(["hi", "", [{"type": "text", "text": "a"}] * rng.randrange(1, 3)])
    message: dict[str, Any] = {"role": rng.choice([*ROLES, "assistant"]), "content": content}
    if rng.random() < 0.3:
        message[rng.choice(["role", "content", "name", "tool_calls", "tool_call_id", "foo"])] = any_value(rng)
    if rng.random() < 0.1 and isinstance(message["content"], list):
        message["content"].append(any_value(rng))
    return message


def any_prompt(rng: random.Random) -> Any:
    if rng.random() < 0.3:
        return any_value(rng)
    ids = [rng.randrange(300) for _ in range(rng.randrange(1, 9))]
    return rng.choice(["hi", "😀 MON", ["a", "b"], ids, [ids, [1]], ["", "x"]])


def any_body(rng: random.Random, path: str) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if rng.random() < 0.97:
        if path == CHAT:
            body["messages"] = (
                [any_message(rng) for _ in range(rng.randrange(4))] if rng.random() < 0.9 else any_value(rng)
            )
        else:
            body["prompt"] = any_prompt(rng)
    for name in rng.sample(sorted(GOOD), rng.randrange(5)):
        body[name] = rng.choice(GOOD[name])
    if rng.random() < 0.5:
        body[rng.choice(NAMES)] = any_value(rng)
    return body


def mutated(rng: random.Random, raw: bytes) -> bytes:
    data = bytearray(raw)
    for _ in range(rng.randrange(1, 3)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[at : at + rng.randrange(1, 6)]
            case 2:
                data[at:at] = rng.choice(
                    [b'"', b"{", b"]", b"\\ud800", b"NaN", b"1e999", b",", b"\xff", b"[" * 2000, b"null"]
                )
            case 3:
                data[at:at] = data[rng.randrange(len(data) + 1) :][: rng.randrange(30)]
            case 4:
                del data[at:]
    return bytes(data)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("way", ["values", "bytes"])
def test_fuzz(api: Api, path: str, way: str) -> None:
    rng = random.Random(f"{path} {way}")
    statuses: Counter[int] = Counter()
    for _ in range(ROUNDS):
        body = (
            any_body(rng, path)
            if way == "values"
            else dict(PLAIN[path], **{k: rng.choice(GOOD[k]) for k in ("n", "seed")})
        )
        raw = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
        if way == "bytes":
            raw = mutated(rng, raw)
        response = api.http.post(path, content=raw, headers={"content-type": "application/json"})
        statuses[response.status_code] += 1
        assert response.status_code in (200, 400, 404, 413), (response.status_code, raw[:2000])
        if response.status_code != 200:
            error = response.json()["error"]
            assert error["message"], raw
            assert len(error["message"]) < 2000
        elif response.headers["content-type"].startswith("text/event-stream"):
            assert response.content.endswith(b"data: [DONE]\n\n"), raw[:2000]
        else:
            assert response.json()["choices"], raw
    assert statuses[200] > ROUNDS / 100, statuses
    assert statuses[400] > ROUNDS / 10, statuses
    assert all(stream.output.finished for stream in api.llm.streams)


def test_asgi_without_uvicorn() -> None:
    """The application is plain ASGI: another server may run it."""
    app = create_app(FakeLLM)

    async def ask() -> list[int]:
        started = asyncio.Event()
        stop = asyncio.Event()

        async def receive() -> dict[str, str]:
            if not started.is_set():
                started.set()
                return {"type": "lifespan.startup"}
            await stop.wait()
            return {"type": "lifespan.shutdown"}

        async def send(message: Any) -> None:
            assert message["type"].endswith("complete"), message

        life = asyncio.ensure_future(app({"type": "lifespan", "asgi": {"version": "3.0"}}, receive, send))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            while (await client.get("/health")).status_code != 200:
                await asyncio.sleep(0.005)
            chat = await client.post(CHAT, json={"messages": [{"role": "user", "content": "hi"}]})
            stream = await client.post(COMPLETIONS, json={"prompt": "hi", "stream": True})
        stop.set()
        await life
        assert stream.content.endswith(b"data: [DONE]\n\n")
        return [chat.status_code, stream.status_code]

    assert asyncio.run(ask()) == [200, 200]
