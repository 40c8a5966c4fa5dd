"""A full queue: 429 and when to come back, in OpenAI's form; nobody else notices. Whose requests are whose."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from headrace.engine import async_llm
from headrace.engine.gate import Gate
from headrace.errors import OverloadedError
from headrace.execute.plan import Masks, Plan, Result
from headrace.params import SamplingParams
from tests.serve.fake_llm import FakeLLM
from tests.serve.http_api import CHAT, Api, error_of
from tests.serve.live_server import LiveServer, until
from tests.serve.test_engine_path import Scripted, loaded


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", ["chat", "complete"])
def test_429(api: Api, ask: str, stream: bool) -> None:
    api.llm.full = OverloadedError("the queue is full: 9 requests wait", 7)
    answer = getattr(api, ask)(stream=stream, n=3)
    assert error_of(answer, 429) == "the queue is full: 9 requests wait"
    assert answer.json()["error"] == {
        "message": "the queue is full: 9 requests wait",
        "type": "rate_limit_error",
        "param": None,
        "code": "queue_full",
    }
    assert answer.headers["retry-after"] == "7"
    assert api.llm.submitted == []
    assert api.llm.asked_room[0][0] == 3


def test_all_choices_of_all_prompts_count_before_any_starts(api: Api) -> None:
    assert api.complete(prompt=["one", "two", "three"], n=2, max_tokens=1).status_code == 200
    assert api.llm.asked_room == [(6, sum(len(ids) for ids, _ in api.llm.submitted))]


def test_a_wrong_request_is_wrong_though_the_queue_is_full(api: Api) -> None:
    api.llm.full = OverloadedError("the queue is full", 1)
    error_of(api.complete(max_tokens=10**6), 400, "max_tokens")


def test_the_official_client_sees_a_rate_limit(api: Api) -> None:
    api.llm.full = OverloadedError("the queue is full", 1)
    client = openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.RateLimitError, match="the queue is full"):
        client.completions.create(model="fake-model", prompt="hi")


def test_who_asks_is_told_by_the_api_key(api: Api) -> None:
    secret = "Bearer sk-very-secret"
    for key in (secret, "Bearer other", secret, None, "", "Bearer ключ".encode()):
        headers: Any = {} if key is None else {"Authorization": key}
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        assert api.http.post(CHAT, json=body, headers=headers).status_code == 200
    one, other, same, none, empty, odd = api.llm.tenants
    assert one == same
    assert len({one, other, none, odd}) == 4
    assert (none, empty) == ("", "")
    assert "secret" not in one


def test_keys_mean_nothing_to_another_server() -> None:
    fakes = [FakeLLM(), FakeLLM()]
    for fake in fakes:
        with LiveServer(lambda fake=fake: fake) as live:
            live.wait_ready()
            body = {"prompt": "hi", "max_tokens": 1}
            httpx.post(f"{live.url}/v1/completions", json=body, headers={"Authorization": "Bearer x"})
    assert fakes[0].tenants != fakes[1].tenants


class Held(Scripted):
    """Runs nothing while it is told not to."""

    def __init__(self, fake: FakeLLM) -> None:
        super().__init__(fake)
        self.go = threading.Event()
        self.begun: list[int] = []
        """The last token of each prompt that was begun."""

    def run(self, plan: Plan, masks: Masks | None = None) -> Result:
        assert self.go.wait(30)
        self.begun += [a.tokens[a.prompt - 1] for a in plan.admitted]
        return super().run(plan, masks)


@pytest.fixture
def crowded() -> Iterator[tuple[Api, async_llm.AsyncLLM, Held]]:
    """The real engine: one request at a time, at most three, or 40 tokens, may wait."""
    fake, kept = FakeLLM(), list[async_llm.AsyncLLM]()
    held = Held(fake)

    def load() -> async_llm.AsyncLLM:
        kept.append(async_llm.AsyncLLM("scripted"))
        return kept[0]

    def scripted(model: Any, *, deliver: Any, **_: Any) -> Any:
        return loaded(fake, deliver, executor=held, gate=Gate(3, 40), rows=1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_llm, "load", scripted)
        with LiveServer(load) as live:
            api = Api(live.wait_ready(), fake)
            yield api, kept[0], held
            held.go.set()
            api.http.close()


def test_a_full_queue(crowded: tuple[Api, async_llm.AsyncLLM, Held]) -> None:
    api, llm, held = crowded
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(api.complete, prompt="a")
        until(lambda: llm.stats().running == 1)
        rest = [pool.submit(api.complete, prompt="b"), pool.submit(api.complete_events, prompt="c", n=2)]
        until(lambda: llm.stats().waiting == 3)
        refused = [api.complete(prompt="d"), api.complete(prompt="d", stream=True), api.chat(n=5)]
        for answer in refused:
            assert "3 requests wait" in error_of(answer, 429)
            assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert (llm.stats().refused, llm.stats().waiting) == (7, 3)
        held.go.set()
        assert first.result().status_code == rest[0].result().status_code == 200
        assert {e["choices"][0]["index"] for e in rest[1].result()} == {0, 1}
    until(lambda: llm.stats().running == 0)
    assert api.complete(prompt="d").status_code == 200
    assert llm.stats().aborts == 0


def test_tokens_count_too_and_a_large_request_is_served_when_nobody_waits(
    crowded: tuple[Api, async_llm.AsyncLLM, Held],
) -> None:
    api, llm, held = crowded
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(api.complete, prompt="a")
        until(lambda: llm.stats().running == 1)
        large = pool.submit(api.complete, prompt="x" * 60, n=4)
        until(lambda: llm.stats().waiting == 4)
        assert llm.stats().waiting_tokens == 60
        assert "4 requests wait" in error_of(api.complete(prompt="d"), 429)
        held.go.set()
        assert first.result().status_code == large.result().status_code == 200
        held.go.clear()
        until(lambda: llm.stats().running == 0)
        again = [pool.submit(api.complete, prompt="a")]
        until(lambda: llm.stats().running == 1)
        again.append(pool.submit(api.complete, prompt="x" * 35))
        until(lambda: llm.stats().waiting == 1)
        assert "35 tokens wait, and 6 more" in error_of(api.complete(prompt="y" * 6), 429)
        again.append(pool.submit(api.complete, prompt="y" * 5))
        until(lambda: llm.stats().waiting == 2)
        held.go.set()
        assert [answer.result().status_code for answer in again] == [200] * 3


def test_clients_that_leave_make_room(crowded: tuple[Api, async_llm.AsyncLLM, Held]) -> None:
    api, llm, held = crowded
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(api.complete, prompt="a")
        until(lambda: llm.stats().running == 1)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{api.url}/v1/completions", json={"prompt": "b", "n": 3}, timeout=0.3)
        error_of(api.complete(prompt="c"), 429)  # the engine is in the midst of a step and has not heard of it
        held.go.set()
        assert first.result().status_code == 200
    until(lambda: llm.stats().waiting == llm.stats().running == 0)
    assert api.complete(prompt="c").status_code == 200


def test_shares_over_http(crowded: tuple[Api, async_llm.AsyncLLM, Held]) -> None:
    """One key has its queue full, another's only request goes before the last of it."""
    api, llm, held = crowded

    def ask(key: str) -> None:
        body = {"prompt": key, "max_tokens": 4}
        answer = httpx.post(f"{api.url}/v1/completions", json=body, headers={"Authorization": key}, timeout=30)
        assert answer.status_code == 200

    with ThreadPoolExecutor(8) as pool:
        pool.submit(ask, "f")
        until(lambda: llm.stats().running == 1)
        for waiting in (1, 2):
            pool.submit(ask, "f")
            until(lambda n=waiting: llm.stats().waiting == n)
        pool.submit(ask, "o")
        until(lambda: llm.stats().waiting == 3)
        held.go.set()
    assert bytes(held.begun) == b"ffof"


def test_the_python_api_refuses_one_by_one(crowded: tuple[Api, async_llm.AsyncLLM, Held]) -> None:
    _, llm, held = crowded

    async def ask() -> None:
        params = SamplingParams(max_tokens=2)
        kept = [llm.submit([1, 2, 3], params)]
        while llm.stats().running < 1:
            await asyncio.sleep(0.002)
        kept += [llm.submit([1, 2, 3], params, tenant="me") for _ in range(3)]
        with pytest.raises(OverloadedError, match="queue_requests, 3") as caught:
            await llm.generate([1, 2, 3], params)
        assert 1 <= caught.value.retry_s <= 60
        held.go.set()
        for stream in kept:
            assert (await stream.drain()).finished

    asyncio.run(ask())
