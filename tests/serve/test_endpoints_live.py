"""Embeddings, tokens and timeouts through the real server, a real engine and a tiny model."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from headrace import AsyncLLM, EngineDeadError
from tests.models.tiny import VOCAB, tiny_checkpoint
from tests.serve.client_checks import client_of
from tests.serve.http_api import CHAT, COMPLETIONS, error_of
from tests.serve.live_server import LiveServer, until

EMBEDDINGS = "/v1/embeddings"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, AsyncLLM]]:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("live"), "gemma3_text", max_position_embeddings=512)
    kept: list[AsyncLLM] = []

    def load() -> AsyncLLM:
        kept.append(AsyncLLM(folder, threads=1, pool_bytes=1 << 24, budget=64))
        return kept[0]

    with LiveServer(load) as live, httpx.Client(base_url=live.url, timeout=60) as http:
        live.wait_ready(60)
        yield http, kept[0]


def idle(llm: AsyncLLM) -> bool:
    stats = llm.stats()
    return stats.running == stats.waiting == stats.blocks_used == 0


def test_many_at_once_are_the_bits_of_each_alone(served: tuple[httpx.Client, AsyncLLM]) -> None:
    http, llm = served
    rng = random.Random(2)
    inputs = [[rng.randrange(VOCAB) for _ in range(rng.choice((1, 31, 32, 33, 100, 500)))] for _ in range(24)]
    alone = [asyncio.run(llm.embed(ids, "mean")).embedding for ids in inputs]

    def ask(few: list[list[int]]) -> list[Any]:
        body = {"input": few, "encoding_format": "base64", "pooling": "mean"}
        answer = httpx.post(f"{http.base_url}{EMBEDDINGS}", json=body, timeout=60)
        return [entry["embedding"] for entry in answer.json()["data"]]

    def beside(seed: int) -> int:
        body = {"prompt": inputs[seed], "max_tokens": 40, "ignore_eos": True, "seed": seed}
        return httpx.post(
            f"{http.base_url}{COMPLETIONS}", json={**body, "truncate_prompt_tokens": 60}, timeout=60
        ).status_code

    with ThreadPoolExecutor(12) as pool:
        others = [pool.submit(beside, seed) for seed in range(4)]
        texts = [text for few in pool.map(ask, [inputs[i : i + 3] for i in range(0, 24, 3)]) for text in few]
    assert [np.frombuffer(base64.b64decode(text), "<f4").tolist() for text in texts] == alone
    assert [other.result() for other in others] == [200] * 4
    assert idle(llm)


def test_a5_official_client(served: tuple[httpx.Client, AsyncLLM]) -> None:
    http, llm = served
    client = client_of(str(http.base_url).rstrip("/"))
    for given in ("some text", ["a", "b c"], [1, 2, 3], [[1], [2, 3]]):
        silent = client.embeddings.create(model=llm.model.name, input=given)
        floats = client.embeddings.create(model=llm.model.name, input=given, encoding_format="float")
        assert [e.embedding for e in silent.data] == [e.embedding for e in floats.data]
        assert len(silent.data[0].embedding) == llm.model.width == 64
        assert silent.usage.prompt_tokens > 0
    cut = client.embeddings.create(model=llm.model.name, input="some text", dimensions=7)
    assert np.linalg.norm(cut.data[0].embedding) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
def test_what_timed_out_is_given_back(served: tuple[httpx.Client, AsyncLLM], path: str, stream: bool) -> None:
    http, llm = served
    start = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": ["a", "b"]}
    body = {**start, "n": 60, "max_tokens": 400, "ignore_eos": True, "timeout_s": 0.2, "stream": stream}
    answer = http.post(path, json=body)
    if stream:
        events = answer.content.removesuffix(b"\n\n").split(b"\n\n")
        assert json.loads(events[-1].removeprefix(b"data: "))["error"]["code"] == "timeout"
    else:
        error_of(answer, 408)
    until(lambda: idle(llm))


def test_embeddings_that_time_out(served: tuple[httpx.Client, AsyncLLM]) -> None:
    http, llm = served
    error_of(http.post(EMBEDDINGS, json={"input": [[7] * 500] * 400, "timeout_s": 0.1}), 408)
    until(lambda: idle(llm))


def test_a_task_that_is_cancelled_gives_back(served: tuple[httpx.Client, AsyncLLM]) -> None:
    _, llm = served

    async def leave() -> None:
        tasks = [asyncio.ensure_future(llm.embed([7] * 500)) for _ in range(40)]
        while not llm.stats().running:
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(leave())
    until(lambda: idle(llm))


def test_tokens_there_and_back(served: tuple[httpx.Client, AsyncLLM]) -> None:
    http, llm = served
    for text in ("", "hé 😀\n\n", "<|turn|>x", "\x00", "a" * 3000):
        told = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
        assert told["tokens"] == llm.tokenizer.encode(text)
        assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
        assert told["max_model_len"] == 512
        assert http.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": text}
    error_of(http.post("/detokenize", json={"tokens": [VOCAB]}), 400, "tokens[0]")
    talk = [{"role": "user", "content": "<|end|>"}]
    for special in (False, True):
        body = {"messages": talk, "parse_special": special}
        want = llm.tokenizer.chat(talk, parse_special_in_content=special)
        assert http.post("/tokenize", json=body).json()["tokens"] == want
        assert http.post(CHAT, json={**body, "max_tokens": 1}).json()["usage"]["prompt_tokens"] == len(want)


def test_what_harnesses_ask_first(served: tuple[httpx.Client, AsyncLLM]) -> None:
    http, llm = served
    told = http.get("/tokenizer_info").json()
    assert told["model_max_length"] == 512
    assert told["chat_template"] == llm.tokenizer.chat_template
    assert told["add_bos_token"] == llm.tokenizer.add_bos
    for name, ids in (("bos_token", {llm.tokenizer.bos}), ("eos_token", llm.tokenizer.eos)):
        (token,) = http.post("/tokenize", json={"prompt": told[name], "add_special_tokens": False}).json()["tokens"]
        assert token in ids


def test_a_model_without_tokens_for_it_fills_no_middle(served: tuple[httpx.Client, AsyncLLM]) -> None:
    message = error_of(served[0].post(COMPLETIONS, json={"prompt": "a", "suffix": "b"}), 400, "suffix")
    assert "fill-in-the-middle" in message


def test_a_closed_engine_says_so(tmp_path: Path) -> None:
    llm = AsyncLLM(tiny_checkpoint(tmp_path, "llama"), threads=1, context=64)
    llm.close()
    with pytest.raises(EngineDeadError):
        asyncio.run(llm.embed([1]))
