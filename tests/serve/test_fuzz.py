"""Thousands of random and mutated bodies: the answer is never a 500, and a plain request is served afterwards.

`make fuzz-http` does the same a hundred thousand times against a real engine (tests/fuzz/fuzz_http.py).
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import httpx
import pytest

from headrace.serve.app import create_app
from tests.fuzz.http_bodies import CHAT, COMPLETIONS, PATHS, PLAIN, WAYS, any_raw, problem_with
from tests.serve.fake_llm import FakeLLM
from tests.serve.http_api import Api

ROUNDS = 700
"""Bodies for each endpoint and way."""


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("way", WAYS)
def test_fuzz(api: Api, path: str, way: str) -> None:
    rng = random.Random(f"{path} {way}")
    statuses: Counter[int] = Counter()
    for _ in range(ROUNDS):
        raw = any_raw(rng, path, way)
        response = api.http.post(path, content=raw, headers={"content-type": "application/json"})
        statuses[response.status_code] += 1
        wrong = problem_with(path, response.status_code, response.headers["content-type"], response.content)
        assert wrong is None, (wrong, raw[:2000])
    assert statuses[200] > ROUNDS / 100, statuses
    assert statuses[400] > ROUNDS / 10, statuses
    assert all(stream.output.finished for stream in api.llm.streams)


def test_plain_bodies_are_answered(api: Api) -> None:
    for path in PATHS:
        assert api.http.post(path, json=PLAIN[path]).status_code == 200, path


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
