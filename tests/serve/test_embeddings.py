"""/v1/embeddings over the scripted model: cases A5, V1 and V2, and every field."""

from __future__ import annotations

import base64
import math
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from headrace.errors import OverloadedError
from headrace.serve.embedding import MAX_INPUTS
from tests.serve.client_checks import client_of
from tests.serve.fake_llm import BOS, CONTEXT, TURN, VOCAB, WIDTH, Script, embedding_of
from tests.serve.http_api import Api, error_of

PATH = "/v1/embeddings"
INPUTS: list[Any] = ["hi", ["hi"], ["hi", "a longer one", "é 😀"], [1, 2, 3], [[1, 2, 3], [7]]]


def embed(api: Api, given: Any = "hi", **body: Any) -> httpx.Response:
    return api.http.post(PATH, json={"input": given, **body})


def ids_of(given: Any) -> list[list[int]]:
    """The token ids of each input."""
    several = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    return [list(one.encode()) if isinstance(one, str) else one for one in several]


def unit(vector: list[float]) -> list[float]:
    length = math.sqrt(math.fsum(x * x for x in vector))
    return [float(np.float32(x / length)) for x in vector]


@pytest.mark.parametrize("given", INPUTS, ids=str)
def test_the_answer(api: Api, given: Any) -> None:
    answer = embed(api, given).json()
    ids = ids_of(given)
    data = [
        {"object": "embedding", "index": i, "embedding": unit(embedding_of(one, "mean"))} for i, one in enumerate(ids)
    ]
    count = sum(map(len, ids))
    usage = {"prompt_tokens": count, "total_tokens": count}
    assert answer == {"object": "list", "data": data, "model": "fake-model", "usage": usage}


@pytest.mark.parametrize("given", INPUTS, ids=str)
@pytest.mark.parametrize("dimensions", [None, 1, 4, WIDTH])
def test_a5_official_client(api: Api, given: Any, dimensions: int | None) -> None:
    """It asks for base64 where no format is given, and decodes that itself."""
    client = client_of(api.url)
    more: dict[str, Any] = {} if dimensions is None else {"dimensions": dimensions}
    floats = client.embeddings.create(model="fake-model", input=given, encoding_format="float", **more)
    silent = client.embeddings.create(model="fake-model", input=given, **more)
    want = [unit(embedding_of(one, "mean")[:dimensions]) for one in ids_of(given)]
    assert [entry.embedding for entry in floats.data] == want
    assert [entry.embedding for entry in silent.data] == want
    assert [entry.index for entry in silent.data] == list(range(len(want)))
    assert silent.usage.prompt_tokens == silent.usage.total_tokens == sum(map(len, ids_of(given)))
    packed = client.embeddings.create(model="fake-model", input=given, encoding_format="base64", **more)
    texts: list[Any] = [entry.embedding for entry in packed.data]
    assert [np.frombuffer(base64.b64decode(text), "<f4").tolist() for text in texts] == want


def test_one_that_comes_late_keeps_its_place(api: Api) -> None:
    api.llm.script = lambda ids, choice: Script([], 0.05 if ids[0] < 3 else 0.0)
    data = embed(api, [[1], [5], [2], [6]], normalize=False).json()["data"]
    assert [entry["embedding"] for entry in data] == [embedding_of([i], "mean") for i in (1, 5, 2, 6)]


def test_pooling_and_normalize(api: Api) -> None:
    def first(**body: Any) -> list[float]:
        return embed(api, [1, 2], **body).json()["data"][0]["embedding"]

    assert first(pooling="last") == unit(embedding_of([1, 2], "last"))
    assert first(pooling="mean", normalize=False) == embedding_of([1, 2], "mean")
    assert first(pooling="last", normalize=False, dimensions=2) == embedding_of([1, 2], "last")[:2]
    assert first(normalize=None, pooling=None, dimensions=None, encoding_format=None) == first()


def test_texts_are_plain_texts(api: Api) -> None:
    assert embed(api, "<|turn|>").status_code == 200
    assert api.llm.submitted[-1][0] == list(b"<|turn|>")
    assert embed(api, "<|turn|>", parse_special=True).status_code == 200
    assert api.llm.submitted[-1][0] == [TURN]
    api.llm.tokenizer.add_bos = True
    assert embed(api, "a").status_code == 200
    assert api.llm.submitted[-1][0] == [BOS, *b"a"]


def test_the_context(api: Api) -> None:
    whole = [1] * CONTEXT
    assert embed(api, whole).status_code == 200
    message = error_of(embed(api, [[1], [2] * (CONTEXT + 1)]), 400, "input[1]")
    assert str(CONTEXT + 1) in message and "truncate_prompt_tokens" in message
    error_of(embed(api, [2] * (CONTEXT + 1)), 400, "input")
    long = list(range(200)) * 4
    for asked, left in ((3, 3), (-1, CONTEXT), (CONTEXT, CONTEXT)):
        answer = embed(api, [long, [9]], truncate_prompt_tokens=asked, normalize=False).json()
        assert answer["data"][0]["embedding"] == embedding_of(long[-left:], "mean")
        assert answer["data"][1]["embedding"] == embedding_of([9], "mean")
        assert answer["usage"]["prompt_tokens"] == left + 1
    error_of(embed(api, [1], truncate_prompt_tokens=CONTEXT + 1), 400, "truncate_prompt_tokens")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [""]}, "input[0]"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[]]}, "input[0]"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": ["a", [1]]}, "input[1]"),
        ({"input": [1, "a"]}, "input[1]"),
        ({"input": [1.0]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [VOCAB]}, "input"),
        ({"input": [[1], [2**63]]}, "input[1]"),
        ({"input": None}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": [[1]] * (MAX_INPUTS + 1)}, "input"),
        ({}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": WIDTH + 1}, "dimensions"),
        ({"input": "a", "dimensions": 1.0}, "dimensions"),
        ({"input": "a", "dimensions": True}, "dimensions"),
        ({"input": "a", "pooling": "cls"}, "pooling"),
        ({"input": "a", "normalize": 1}, "normalize"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "priority": 101}, "priority"),
        ({"input": "a", "cache_salt": "x" * 257}, "cache_salt"),
        ({"input": "a", "timeout_s": 0}, "timeout_s"),
        ({"input": "a", "stream": True}, "stream"),
        ({"input": "a", "messages": []}, "messages"),
        ({"input": "a", "temperature": 0}, "temperature"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_refusals(api: Api, body: dict[str, Any], param: str) -> None:
    """V1 and V2 among them: nothing of such a request runs."""
    error_of(api.http.post(PATH, json=body), 400, param)
    assert api.llm.submitted == []


def test_what_clients_send_without_effect(api: Api) -> None:
    assert embed(api, user="me", add_special_tokens=True, embed_dtype="float32").status_code == 200


def test_other_errors(api: Api) -> None:
    error_of(embed(api, model="text-embedding-3-small"), 404, "model")
    with pytest.raises(openai.BadRequestError):
        client_of(api.url).embeddings.create(model="fake-model", input="")
    api.llm.full = OverloadedError("the queue is full", 7)
    refused = embed(api, ["a", "bc"])
    error_of(refused, 429)
    assert refused.headers["retry-after"] == "7"
    assert api.llm.asked_room[-1] == (2, 3)
    api.llm.full = None
    api.llm.script = lambda ids, choice: Script([], 30.0)
    error_of(embed(api, ["a", "b"], timeout_s=0.05), 408)
    assert api.llm.aborts == 2
