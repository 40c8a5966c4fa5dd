"""Constrained answers of SmolLM2 over HTTP: cases G1, G3, G4, G5, S1, S3 and the grammar part of K7; with what else."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.constrain.guided import Guided
from headrace.engine.async_llm import AsyncLLM
from tests.serve.http_api import CHAT, COMPLETIONS, error_of, events_of
from tests.serve.live_server import LiveServer, until

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TALK = [{"role": "user", "content": "Who are you?"}]


@pytest.fixture(scope="module")
def served(smollm2: Path) -> Iterator[tuple[str, AsyncLLM]]:
    kept: list[AsyncLLM] = []

    def load() -> AsyncLLM:
        kept.append(AsyncLLM(smollm2, context=1024, threads=2))
        return kept[0]

    with LiveServer(load) as live:
        yield live.wait_ready(120).url, kept[0]


@pytest.fixture
def http(served: tuple[str, AsyncLLM]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served[0], timeout=120) as client:
        yield client
        plain = client.post(CHAT, json={"messages": TALK, "max_tokens": 3})
        assert plain.status_code == 200 and plain.json()["choices"][0]["message"]["content"]


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post(COMPLETIONS, json={"prompt": "It is", "max_tokens": 64, "seed": 5, **body})
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def streamed(http: httpx.Client, **body: Any) -> tuple[str, str]:
    """Text and finish reason."""
    body = {"prompt": "It is", "max_tokens": 64, "seed": 5, "stream": True, **body}
    choices = [event["choices"][0] for event in events_of(http.post(COMPLETIONS, json=body))]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


def schema(of: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": of}}


# What works


@pytest.mark.parametrize("temperature", [0, 1, 2])
def test_a_schema_is_kept_in_chats(temperature: float, http: httpx.Client) -> None:
    for seed in range(5):
        body = {"messages": TALK, "temperature": temperature, "seed": seed, "max_tokens": 120, "n": 2}
        choices = http.post(CHAT, json={**body, "response_format": schema(PERSON)}).json()["choices"]
        for choice in choices:
            assert choice["finish_reason"] == "stop"
            found = json.loads(choice["message"]["content"])
            assert found.keys() == {"name", "age"} and 0 <= found["age"] <= 150 and len(found["name"]) <= 20


@pytest.mark.parametrize(
    ("how", "right"),
    [
        ({"json": {"enum": ["red", "blue"]}}, '"(red|blue)"'),
        ({"json": json.dumps({"const": 5})}, "5"),
        ({"json_object": True}, r"(?s)\{.*"),
        ({"regex": "[A-C]{3}-[0-9]{2}"}, "[A-C]{3}-[0-9]{2}"),
        ({"choice": ["left", "right", "straight on"]}, "left|right|straight on"),
        ({"grammar": 'root ::= "a" ("b" | "c")'}, "a[bc]"),
        ({"grammar": 'start: "x" /[0-9]{4}/'}, "x[0-9]{4}"),
    ],
)
def test_each_kind(how: dict[str, Any], right: str, http: httpx.Client) -> None:
    whole = complete(http, structured_outputs=how)
    assert re.fullmatch(right, whole["text"]), whole
    assert streamed(http, structured_outputs=how) == (whole["text"], whole["finish_reason"])


def test_the_length_cuts_it_and_says_so(http: httpx.Client) -> None:
    cut = complete(http, structured_outputs={"regex": "(abc){50}"}, max_tokens=7)
    assert cut["finish_reason"] == "length" and ("abc" * 50).startswith(cut["text"])


def test_with_a_length_at_least(http: httpx.Client) -> None:
    """An answer that may go on does; one that cannot ends."""
    assert complete(http, structured_outputs={"regex": "a*"}, min_tokens=20, temperature=0)["text"].count("a") >= 20
    assert complete(http, structured_outputs={"regex": "ok"}, min_tokens=20)["text"] == "ok"


def test_with_log_probabilities(http: httpx.Client) -> None:
    """Of the model itself, or of what was left to choose from."""
    for mode in ("raw", "processed"):
        got = complete(http, structured_outputs={"regex": "zq{3}"}, logprobs=2, logprobs_mode=mode, temperature=1)
        assert "".join(got["logprobs"]["tokens"]) == got["text"] == "zqqq"
        forced = got["logprobs"]["token_logprobs"][-1]
        assert forced < -1 if mode == "raw" else forced == pytest.approx(0, abs=0.7)


def test_with_bias_and_penalties(http: httpx.Client) -> None:
    bias = {str(token): 100 for token in (0, 2, 28, 30)}
    got = complete(http, structured_outputs={"regex": "(red|blue){8}"}, logit_bias=bias, repetition_penalty=1.8)
    assert re.fullmatch("(red|blue){8}", got["text"])


def test_beside_others_and_across_chunks_it_is_the_same(http: httpx.Client) -> None:
    body = {"prompt": "word " * 700, "max_tokens": 60, "seed": 3, "temperature": 1.5}
    body["structured_outputs"] = {"json": PERSON}
    alone = http.post(COMPLETIONS, json=body).json()["choices"][0]["text"]
    assert json.loads(alone)
    others = [{"prompt": f"{i} is", "max_tokens": 40, "seed": i} for i in range(8)]
    others += [{**other, "structured_outputs": {"regex": "[a-z ]{60}"}} for other in others]
    with ThreadPoolExecutor(20) as pool:
        beside = [pool.submit(http.post, COMPLETIONS, json=one) for one in [*others, body, body]]
        texts = [future.result().json()["choices"][0]["text"] for future in beside]
    assert texts[-2:] == [alone, alone]
    assert all(re.fullmatch("[a-z ]{1,60}", text) for text in texts[8:16])


# Cases


@pytest.mark.parametrize("stream", [False, True])
def test_s1_stop_strings(stream: bool, http: httpx.Client) -> None:
    def said(pattern: str, stop: list[str]) -> tuple[str, str, str]:
        how = {"structured_outputs": {"regex": pattern}, "stop": stop}
        if stream:
            return (*streamed(http, **how), "")
        got = complete(http, **how)
        return got["text"], got["finish_reason"], ""

    assert said("MONDAYTUESDAY", ["DAYTUE"]) == ("MON", "stop", "")
    assert said("MONDAYT", ["DAYTUE"]) == ("MONDAYT", "stop", "")
    assert said("MONDAYTUESDAY", ["UESD", "NDAYT"]) == ("MO", "stop", "")


@pytest.mark.parametrize("most", range(1, 21))
def test_s3_characters_of_several_tokens(most: int, http: httpx.Client) -> None:
    text = "😀霓é👩‍👩‍👧"
    how = {"structured_outputs": {"regex": text}, "max_tokens": most}
    got = complete(http, **how)
    assert text.startswith(got["text"]) and "\ufffd" not in got["text"]
    assert streamed(http, **how) == (got["text"], got["finish_reason"])
    for event in events_of(http.post(COMPLETIONS, json={"prompt": "It is", **how, "stream": True})):
        assert "\ufffd" not in event["choices"][0]["text"]
    if most == 20:
        assert got["text"] == text and got["finish_reason"] == "stop"


ODD = {
    "nothing": {"type": "object", "properties": {}},
    "long": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 8192}}, "required": ["a"]},
    "unanchored": {"type": "object", "properties": {"a": {"type": "string", "pattern": "\\S"}}, "required": ["a"]},
    "anchored": {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-z]+$"}}, "required": ["a"]},
}


@pytest.mark.parametrize("name", ODD)
def test_g1_schemas_that_others_fail_on(name: str, http: httpx.Client) -> None:
    whole = 0
    for seed in range(4):
        body = {
            "messages": TALK,
            "temperature": 1,
            "seed": seed,
            "max_tokens": 80,
            "response_format": schema(ODD[name]),
        }
        choice = http.post(CHAT, json=body).json()["choices"][0]
        if choice["finish_reason"] == "stop":
            whole += 1
            found = json.loads(choice["message"]["content"])
            assert name != "unanchored" or re.search(r"\S", found["a"])
            assert name != "anchored" or re.fullmatch("[a-z]+", found["a"])
    assert whole


def test_g3_blanks_are_bounded(http: httpx.Client, served: tuple[str, AsyncLLM]) -> None:
    """A small model that is pushed towards blanks still finishes its documents."""
    two = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}, "required": ["a", "b"]}
    tokenizer = served[1].tokenizer
    push = {str(token): 20 for text in (" ", "\n") for token in tokenizer.encode(text, add_bos=False)}
    for seed in range(12):
        for form in (schema(two), {"type": "json_object"}):
            body = {"messages": TALK, "temperature": 1, "seed": seed, "max_tokens": 400, "response_format": form}
            body["logit_bias"] = push if seed % 2 else {}
            choice = http.post(CHAT, json=body).json()["choices"][0]
            text = choice["message"]["content"]
            outside = re.sub(r'"([^"\\]|\\.)*"?', '""', text)
            assert not re.search(r"\s{9}", outside), text
            if choice["finish_reason"] == "stop":
                json.loads(text)


def test_g4_no_end_inside_a_document(http: httpx.Client) -> None:
    """End tokens that are pushed, some of them text: complete, or cut by the length."""
    of = {"type": "object", "properties": {"a": {"type": "string", "minLength": 30}}, "required": ["a"]}
    for ends in ([0], [0, 1], [17, 1]):
        body = {"messages": TALK, "temperature": 1, "max_tokens": 200, "response_format": schema(of), "seed": 1}
        body |= {"stop_token_ids": ends, "logit_bias": {str(end): 100 for end in (*ends, 2)}}
        choice = http.post(CHAT, json=body).json()["choices"][0]
        if choice["finish_reason"] == "stop":
            assert len(json.loads(choice["message"]["content"])["a"]) >= 30
        else:
            assert choice["finish_reason"] == "length"


def test_g4_a_stop_string_wins(http: httpx.Client) -> None:
    got = complete(http, structured_outputs={"json": PERSON}, stop=["}"], max_tokens=120)
    assert got["finish_reason"] == "stop" and got["stop_reason"] == "}" and "}" not in got["text"]


@contextlib.contextmanager
def beside_a_running_answer(http: httpx.Client, llm: AsyncLLM) -> Iterator[None]:
    """What is refused meanwhile must not be noticed by it."""
    plain = {"prompt": "a", "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    answers: list[dict[str, Any]] = []
    running = threading.Thread(target=lambda: answers.append(complete(http, **plain)))
    running.start()
    until(lambda: llm.stats().running == 1)
    try:
        yield
    finally:
        running.join()
    assert answers == [complete(http, **plain)] and answers[0]["finish_reason"] == "length"


@pytest.mark.parametrize("regex", ["[", "(", "*a", "(?<=x)+", "a{999999999}"])
def test_g5_bad_regexes(regex: str, http: httpx.Client, served: tuple[str, AsyncLLM]) -> None:
    with beside_a_running_answer(http, served[1]):
        said = error_of(http.post(COMPLETIONS, json={"prompt": "a", "structured_outputs": {"regex": regex}}), 400)
        assert "regex" in said
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("of", "param"),
    [
        ({"type": "strnig"}, ".type"),
        ({"type": 5}, ".type"),
        ([], ""),
        ({"enum": []}, ".enum"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, ".minimum"),
        ({"type": "array", "minItems": 3, "maxItems": 1}, ".minItems"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)"}}}, ".properties.a.pattern"),
        ({"properties": {"a": {"oneOf": [{"type": "integer"}, {"minimum": 1}]}}}, ".properties.a"),
    ],
)
def test_g5_bad_schemas(of: Any, param: str, http: httpx.Client, served: tuple[str, AsyncLLM]) -> None:
    with beside_a_running_answer(http, served[1]):
        answer = http.post(CHAT, json={"messages": TALK, "response_format": schema(of)})
    error_of(answer, 400)
    path = f"response_format.json_schema.schema{param}"
    assert answer.json()["error"]["param"] == path and path in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "foo"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {**schema({}), "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
        ({"response_format": {**schema({}), "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"response_format": schema(5)}, "response_format.json_schema.schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs.choice[1]"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": "start: a\na: %json {}"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": {"x-guidance": {"lenient": True}}}}, "structured_outputs.json.x-guidance"),
        ({"structured_outputs": {"json": '{"typ": 1}'}}, "structured_outputs.json.typ"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"guided_json": {}}, "guided_json"),
    ],
)  # fmt: skip
def test_g5_what_is_malformed_is_named(body: dict[str, Any], param: str, http: httpx.Client) -> None:
    error_of(http.post(CHAT, json={"messages": TALK, **body}), 400, param)


def test_k7_who_waits_for_a_grammar_holds_nobody_up(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow grammars are compiled aside: plain requests begin at once, on every seat."""
    made = Guided.of

    def slowly(tokenizer: Any, source: str) -> Guided:
        time.sleep(1)
        return made(tokenizer, source)

    monkeypatch.setattr(Guided, "of", slowly)
    slow = [{"prompt": "a", "structured_outputs": {"regex": f"x{i}("}} for i in range(6)]
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(http.post, COMPLETIONS, json=one) for one in slow]
        began = time.monotonic()
        assert complete(http, max_tokens=1)["finish_reason"] == "length"
        assert not all(future.done() for future in waiting)
        assert time.monotonic() - began < 2
        assert {future.result().status_code for future in waiting} == {400}
