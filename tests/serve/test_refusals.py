"""Bad requests: each gets a 4xx that names the field, and the next plain request is served (the fixture sees to it)."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from typing import Any

import httpx
import pytest

from headrace.serve import fields
from headrace.serve.bodies import ChatBody, CompletionBody
from headrace.serve.reading import QUOTED, quoted
from tests.serve.fake_llm import VOCAB, Script
from tests.serve.http_api import CHAT, COMPLETIONS, Api, error_of

# ---- values


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "0.7"),
        ("temperature", True),
        ("temperature", 10**400),
        ("temperature", [0.5]),
        ("top_p", 0),
        ("top_p", 1.0001),
        ("top_p", -0.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", 2**63),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("presence_penalty", 2.1),
        ("presence_penalty", "0"),
        ("frequency_penalty", -2.1),
        ("n", 0),
        ("n", -1),
        ("n", 129),
        ("n", 1.0),
        ("n", True),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", "1"),
        ("seed", 0.0),
        ("min_tokens", -1),
        ("min_tokens", 511),
        ("ignore_eos", 1),
        ("ignore_eos", "true"),
        ("skip_special_tokens", 0),
        ("include_stop_str_in_output", "no"),
        ("logprobs_mode", "cooked"),
        ("logprobs_mode", 1),
        ("stream", "yes"),
        ("stream", 1),
        ("model", 5),
        ("parse_special", "x"),
        # V2
        ("stop_token_ids", [VOCAB]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [2**63]),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
        ("logit_bias", {str(VOCAB): 5}),
        ("logit_bias", {"cat": -100}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1": 1e9}),
        ("logit_bias", {"1": "NaN"}),
        ("logit_bias", {"1": None}),
        ("logit_bias", {"1": True}),
        ("logit_bias", {"١": 1}),
        ("logit_bias", {str(2**64): 1}),
        ("logit_bias", [[1, 5]]),
        # V6
        ("stop", ""),
        ("stop", ["", "x"]),
        ("stop", ["x"] * 17),
        ("stop", "x" * 2**20),
        ("stop", [1]),
        ("stop", 5),
        ("stop", {"a": 1}),
        ("stop", [["x"]]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_p2_v2_v6_values(api: Api, field: str, value: Any, stream: bool) -> None:
    for ask in (api.chat, api.complete):
        message = error_of(ask(**({"stream": stream} | {field: value})), 400)
        response = ask(**({"stream": stream} | {field: value}))
        param = response.json()["error"]["param"]
        assert re.split(r"[.[]", param)[0] == field
        assert field in message
        assert len(message) < 1000
    assert not api.llm.submitted


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"stop": ["a", 3]}, "stop[1]", "stop[1] must be a string"),
        ({"stop": ["a", ""]}, "stop[1]", "stop[1] must not be empty"),
        ({"stop_token_ids": [1, "2"]}, "stop_token_ids[1]", "stop_token_ids[1]"),
        ({"stop_token_ids": [1, VOCAB]}, "stop_token_ids[1]", f"holds {VOCAB}, which is no token id"),
        ({"logit_bias": {"1": 5, "2": "x"}}, "logit_bias.2", "logit_bias.2: input should be a valid number, not 'x'"),
        ({"logit_bias": {"1": 5, "2": 101}}, "logit_bias.2", "logit_bias.2 must be a number from -100 to 100"),
        ({"logit_bias": {"cat": 5}}, "logit_bias.cat", "the key 'cat', which is no token id"),
        ({"logit_bias": {str(VOCAB): 5}}, f"logit_bias.{VOCAB}", f"holds {VOCAB}, which is no token id"),
        ({"logit_bias": {"x" * 5000: "y"}}, f"logit_bias.{'x' * QUOTED}", "valid number"),
    ],
)
def test_the_entry_at_fault_is_named(api: Api, body: dict[str, Any], param: str, words: str) -> None:
    for ask in (api.chat, api.complete):
        assert words in error_of(ask(**body), 400, param)


@pytest.mark.parametrize("value", [0, 1e-4, 1e-8, 1e-300, 5e-324, 1, 2.0, 100])
def test_p2_temperatures(api: Api, value: float) -> None:
    assert api.chat(temperature=value).status_code == 200
    assert api.llm.submitted[-1][1].temperature == value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", -1),
        ("top_k", 0),
        ("top_k", 10**9),
        ("top_p", 1),
        ("min_p", 0),
        ("min_p", 1),
        ("stop", []),
        ("stop", None),
        ("stop", ["v"] * 5),
        ("logit_bias", {}),
        ("stop_token_ids", []),
    ],
)
def test_legal_edges(api: Api, field: str, value: Any) -> None:
    for ask in (api.chat, api.complete):
        answer = ask(**{field: value})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
def test_token_ids_are_bounded_over_all_choices(api: Api, field: str) -> None:
    """Half a megabyte of them, with two thousand prompts, would hold up the event loop for minutes."""
    ids = [i % VOCAB for i in range(2**17)]
    many: Any = ids if field == "stop_token_ids" else {str(i): 1 for i in range(2**17)}
    more: Any = [*ids, *ids, 1] if field == "stop_token_ids" else {str(i): 1 for i in range(2**18 + 1)}
    start = time.perf_counter()
    for answer in (
        api.complete(prompt=["a"] * 2048, **{field: many}),
        api.complete(prompt=["a"] * 3, **{field: many}),
        api.complete(n=3, **{field: many}),
        api.chat(n=3, **{field: many}),
        api.chat(**{field: more}),
    ):
        assert "at most 262144 together" in error_of(answer, 400, field)
    assert time.perf_counter() - start < 20
    assert not api.llm.submitted
    one: Any = [VOCAB - 1] if field == "stop_token_ids" else {str(VOCAB - 1): 1}
    assert api.complete(prompt=["a"] * 100, n=20, max_tokens=1, **{field: one}).status_code == 200


def test_null_is_absent(api: Api) -> None:
    every = {name: None for name in ChatBody.model_fields if name != "messages"}
    assert api.chat(**every).json()["choices"][0]["message"]["content"] == "hello world, MONDAY"
    every = {name: None for name in CompletionBody.model_fields if name != "prompt"}
    assert api.complete(**every).json()["choices"][0]["text"] == "hello world, MONDAY"
    error_of(api.complete(prompt=None), 400, "prompt")


@pytest.mark.parametrize("ids", [[-1], [VOCAB], [2**63], [10**300], [1, 2, VOCAB]])
def test_v2_prompt_ids(api: Api, ids: list[int]) -> None:
    api.llm.script = lambda prompt, choice: Script(list(b"the same whoever the neighbours are"), 0.005)
    alone = api.complete(max_tokens=30).json()["choices"][0]["text"]
    texts: list[str] = []
    running = threading.Thread(target=lambda: texts.append(api.complete(max_tokens=30).json()["choices"][0]["text"]))
    running.start()
    time.sleep(0.03)
    with httpx.Client(base_url=api.url) as other:
        error_of(other.post(COMPLETIONS, json={"prompt": ids, "min_tokens": 3}), 400, "prompt")
        error_of(other.post(COMPLETIONS, json={"prompt": [[1], ids], "min_tokens": 3}), 400, "prompt[1]")
    running.join()
    assert texts == [alone]


# ---- lengths (V5)


def chat_of(tokens: int) -> list[dict[str, str]]:
    """A conversation that the scripted template makes this many tokens of."""
    return [{"role": "user", "content": "x" * (tokens - 8)}]


def test_v5_lengths(api: Api) -> None:
    api.llm.script = lambda prompt, choice: Script([120] * 600)
    message = error_of(api.complete(prompt=[1] * 8, max_tokens=510), 400, "max_tokens")
    assert all(number in message for number in ("510", "512", "8", "504"))
    message = error_of(api.chat(messages=chat_of(10), max_tokens=510), 400, "max_tokens")
    assert all(number in message for number in ("510", "512", "10", "502"))
    message = error_of(api.chat(messages=chat_of(10), max_completion_tokens=510), 400, "max_completion_tokens")
    assert "max_completion_tokens is 510" in message
    for prompt, kind in (([1] * 600, api.complete), ("x" * 600, api.complete)):
        message = error_of(kind(prompt=prompt), 400, "prompt")
        assert "600" in message
        assert "512" in message
    message = error_of(api.chat(messages=chat_of(600)), 400, "messages")
    assert "600" in message
    assert "512" in message
    for fits in (api.complete(prompt=[1] * 511), api.complete(prompt=[1] * 511, max_tokens=None)):
        assert fits.json()["usage"]["completion_tokens"] == 1
        assert fits.json()["choices"][0]["finish_reason"] == "length"
    assert api.chat(messages=chat_of(511)).json()["usage"]["completion_tokens"] == 1
    error_of(api.complete(prompt=[1] * 512), 400, "prompt")
    error_of(api.chat(messages=chat_of(512)), 400, "messages")
    assert api.chat(messages=chat_of(500)).json()["usage"]["completion_tokens"] == 12
    api.llm.reset()


def test_v5_both_names_of_the_limit(api: Api) -> None:
    api.llm.script = lambda prompt, choice: Script([120] * 600)
    for limit in ({"max_completion_tokens": 4}, {"max_tokens": 4}, {"max_completion_tokens": 4, "max_tokens": 4}):
        assert api.chat(**limit).json()["usage"]["completion_tokens"] == 4
    assert api.chat(max_tokens=None, max_completion_tokens=4).json()["usage"]["completion_tokens"] == 4
    message = error_of(api.chat(max_tokens=5, max_completion_tokens=4), 400, "max_completion_tokens")
    assert "max_tokens (5)" in message
    error_of(api.complete(max_completion_tokens=4), 400, "max_completion_tokens")
    api.llm.reset()


@pytest.mark.parametrize("value", [0, -1, 1.5, 10**12, "5", True, [], 2**31])
def test_v5_odd_limits(api: Api, value: Any) -> None:
    error_of(api.chat(max_tokens=value), 400, "max_tokens")
    assert "max_completion_tokens" in error_of(api.chat(max_completion_tokens=value), 400, "max_completion_tokens")
    error_of(api.complete(max_tokens=value), 400, "max_tokens")
    assert api.chat(max_tokens=None).status_code == 200


def test_v5_huge_prompt_leaves_others_alone(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 MB of prompt: refused, and streams and /health go on meanwhile."""
    encode = api.llm.tokenizer.encode
    monkeypatch.setattr(
        api.llm.tokenizer, "encode", lambda text, **how: [1] * len(text) if len(text) > 10**6 else encode(text, **how)
    )
    api.llm.script = lambda prompt, choice: Script([120] * 600, 0.004)
    gaps = []

    def stream() -> None:
        with httpx.stream(
            "POST", api.url + CHAT, json={"messages": chat_of(10), "stream": True, "max_tokens": 200}
        ) as response:
            last = time.monotonic()
            for _ in response.iter_raw():
                gaps.append(time.monotonic() - last)
                last = time.monotonic()

    running = threading.Thread(target=stream)
    running.start()
    time.sleep(0.1)
    start = time.monotonic()
    message = error_of(api.complete(prompt="word " * 10**6), 400, "prompt")
    took = time.monotonic() - start
    assert "5000000" in message
    error_of(api.chat(messages=[{"role": "user", "content": "word " * 10**6}]), 400, "messages")
    error_of(api.complete(prompt="x" * (2**24 + 1)), 413)
    running.join()
    api.llm.reset()
    assert took < 5
    assert max(gaps) < 0.5
    assert len(gaps) > 150


# ---- fields


def test_unknown_fields_are_named(api: Api) -> None:
    message = error_of(api.chat(temprature=0.5), 400, "temprature")
    assert "did you mean temperature?" in message
    error_of(api.chat(foo=None), 400, "foo")
    error_of(api.complete(**{"": 1}), 400, "")
    error_of(api.chat(**{"x" * 5000: 1}), 400, "x" * 128)


def test_ignored_fields(api: Api) -> None:
    everything = {name: value for name in fields.IGNORED for value in ("x",)}
    assert api.chat(**everything).status_code == 200
    assert api.complete(**everything).status_code == 200
    assert api.chat(metadata={"a": "b"}, store=True, user="u").status_code == 200


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_refused_fields(api: Api, endpoint: str) -> None:
    ask = api.chat if endpoint == "chat" else api.complete
    table = fields.CHAT if endpoint == "chat" else fields.COMPLETIONS
    supported = ChatBody if endpoint == "chat" else CompletionBody
    assert not set(table) & (set(supported.model_fields) | set(fields.IGNORED))
    for name, rule in table.items():
        message = error_of(ask(**{name: {"some": "thing"}}), 400, name)
        assert rule.why in message
        for value in (None, *rule.neutral):
            assert ask(max_tokens=1, **{name: value}).status_code == 200, (name, value)
    assert len(api.llm.submitted) == sum(1 + len(rule.neutral) for rule in table.values())


@pytest.mark.parametrize(
    ("choice", "param", "words"),
    [
        ("a", "", "structured_outputs.choice must be a list of strings, not 'a'"),
        ({"a": 1}, "", "must be a list of strings, not an object"),
        ([], "", "structured_outputs.choice must hold at least one string"),
        (["a", 5], "[1]", "structured_outputs.choice[1] must be a string that is not empty, not 5"),
        ([""], "[0]", "structured_outputs.choice[0] must be a string that is not empty, not ''"),
    ],
)
def test_choices_say_what_they_need(api: Api, choice: Any, param: str, words: str) -> None:
    for ask in (api.chat, api.complete):
        answer = ask(structured_outputs={"choice": choice})
        assert words in error_of(answer, 400, f"structured_outputs.choice{param}")


def test_what_openai_users_ask_first(api: Api) -> None:
    error_of(api.chat(tool_choice="required"), 400, "tool_choice")
    error_of(api.chat(response_format={"type": "json"}), 400, "response_format.type")
    error_of(
        api.chat(response_format={"type": "json_schema", "json_schema": {}}), 400, "response_format.json_schema.name"
    )
    error_of(api.chat(functions=[{}]), 400, "functions")
    error_of(api.complete(suffix="x"), 400, "suffix")
    error_of(api.complete(best_of=3, n=2), 400, "best_of")
    error_of(api.complete(best_of=True), 400, "best_of")
    assert "only the same as n" in error_of(api.complete(best_of=1, n=2), 400, "best_of")
    assert api.complete(best_of=2, n=2).status_code == 200
    assert api.complete(best_of=1).status_code == 200
    error_of(api.complete(length_penalty=True), 400, "length_penalty")
    error_of(api.chat(echo=True), 400, "echo")


def test_models(api: Api) -> None:
    listed = api.http.get("/v1/models").json()
    assert listed["object"] == "list"
    assert listed["data"] == [
        {
            "id": "fake-model",
            "object": "model",
            "created": listed["data"][0]["created"],
            "owned_by": "headrace",
            "max_model_len": 512,
        }
    ]
    assert api.http.get("/v1/models/fake-model").json() == listed["data"][0]
    for wrong in (api.http.get("/v1/models/gpt-4"), api.http.get("/v1/models/a/b"), api.chat(model="gpt-4")):
        message = error_of(wrong, 404, "model")
        assert "fake-model" in message
        assert wrong.json()["error"]["code"] == "model_not_found"
    error_of(api.complete(model=""), 404, "model")
    assert api.complete(model="fake-model").json()["model"] == "fake-model"


# ---- bodies and HTTP


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        (0, "0"),
        (1.5, "1.5"),
        (-(10**QUOTED), "that large a number"),
        ("a'b", repr("a'b")),
        ("x" * QUOTED, f"'{'x' * QUOTED}'"),
        ("x" * (QUOTED + 1), f"'{'x' * QUOTED}'..."),
        ([], "an empty list"),
        ([1], "a list"),
        ({}, "an object"),
    ],
)
def test_values_in_errors(value: Any, shown: str) -> None:
    assert quoted(value) == shown


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b"  ", "empty"),
        (b"{", "not JSON"),
        (b'{"prompt": "x",}', "not JSON"),
        (b"{'prompt': 'x'}", "not JSON"),
        (b'{"prompt": "x"} x', "not JSON"),
        (b'"x"', "not 'x'"),
        (b"[1]", "a list"),
        (b"null", "null"),
        (b"5", "not 5"),
        (b"true", "not true"),
        (b'{"prompt": "x", "temperature": NaN}', "NaN"),
        (b'{"prompt": "x", "temperature": Infinity}', "Infinity"),
        (b'{"prompt": "x", "temperature": -Infinity}', "-Infinity"),
        (b'{"prompt": "x", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "x", "logit_bias": {"1": -1e999}}', "logit_bias"),
        (b'{"prompt": "x", "temperature": 1, "temperature": 0}', "'temperature' stands twice"),
        (b'{"prompt": "x", "logit_bias": {"1": 1, "1": 2}}', "'1' stands twice"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": "\xed\xa0\x80"}', "not UTF-8"),
        (b'\xef\xbb\xbf{"prompt": "x"}', "not JSON"),
        ('{"prompt": "x"}'.encode("utf-16"), "not UTF-8"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "\\udc00x"}', "surrogate"),
        (b'{"prompt": ["x", "\\uD83D"]}', "surrogate"),
        (b'{"prompt": "x", "\\ud800": 1}', "surrogate"),
        (b'{"prompt": "x", "user": {"a": [{"b": "\\uDFFF"}]}}', "surrogate"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"user": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}", "nested too deeply"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"prompt": "a\nb"}', "not JSON"),
        (b'{"prompt": "a\x00b"}', "not JSON"),
    ],
)
def test_bad_bodies(api: Api, body: bytes, words: str) -> None:
    for path in (COMPLETIONS, CHAT):
        if path == CHAT:
            body = body.replace(b'"prompt"', b'"prompt" ')
        response = api.http.post(path, content=body, headers={"content-type": "application/json"})
        message = error_of(response, 400)
        assert path == CHAT or words in message
    assert not api.llm.submitted


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt": "x", "temperature": 1, "temperature": 0}', "temperature"),
        (b'{"prompt": "x", "logit_bias": {"1": 1, "1": 2}}', "1"),
        (b'{"prompt": "x", "' + b"k" * 500 + b'": 1, "' + b"k" * 500 + b'": 2}', "k" * QUOTED),
        (b'{"prompt": "x", "\\ud800": 1, "\\ud800": 2}', "\\ud800"),
    ],
    ids=["field", "inside", "long", "surrogate"],
)
def test_a_key_that_stands_twice_is_named(api: Api, body: bytes, param: str) -> None:
    response = api.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert "stands twice" in error_of(response, 400, param)


def test_good_odd_bodies(api: Api) -> None:
    for body in (
        b'\n {"prompt": "\\ud83d\\ude00"} \n',
        b'{"prompt": "\\u0000"}',
        '{"prompt": "😀\ufffe"}'.encode(),
        b'{"prompt": "x", "temperature": 1E0, "top_p": 0.5e+0}',
    ):
        response = api.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 200, response.text


def test_content_types(api: Api) -> None:
    body = json.dumps({"prompt": "x"}).encode()
    for good in ("application/json", "application/json; charset=utf-8", 'Application/JSON;charset="UTF-8"', None):
        request = api.http.build_request("POST", COMPLETIONS, content=body)
        if good:
            request.headers["content-type"] = good
        assert api.http.send(request).status_code == 200, good
    for bad in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/json; charset=latin-1",
        "json",
        "",
    ):
        message = error_of(api.http.post(COMPLETIONS, content=body, headers={"content-type": bad}), 415)
        assert "application/json" in message or "utf-8" in message
    error_of(api.http.post(COMPLETIONS, content=body, headers={"content-encoding": "gzip"}), 415)


def test_large_bodies(api: Api) -> None:
    response = api.complete(prompt="x" * 2**24)
    assert "16777216" in error_of(response, 413)
    assert response.headers["connection"] == "close"

    def pieces() -> Any:
        yield b'{"prompt": "'
        for _ in range(20):
            yield b"x" * 2**20

    headers = {"content-type": "application/json"}
    error_of(api.http.post(COMPLETIONS, content=pieces(), headers=headers), 413)
    error_of(api.http.post(COMPLETIONS, content=b"[" + b"," * (2**21 + 1), headers=headers), 413)


def test_a_client_that_asks_first_sends_nothing(api: Api) -> None:
    with socket.create_connection(("127.0.0.1", api.live.port), 5) as sock:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        sock.sendall(f"{head}Content-Length: 1{'0' * 17}\r\nExpect: 100-continue\r\n\r\n".encode())
        assert sock.recv(100).startswith(b"HTTP/1.1 413")


def test_a_body_cut_short_is_nobodys_request(api: Api) -> None:
    with socket.create_connection(("127.0.0.1", api.live.port), 5) as sock:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        sock.sendall(f'{head}Content-Length: 100\r\n\r\n{{"prompt"'.encode())
    assert not api.llm.submitted


def test_paths_and_methods(api: Api) -> None:
    for path in (
        "/",
        "/v1",
        "/v1/",
        "/v1/chat/completions/",
        "/health/",
        "/V1/models",
        "/v1/rerank",
        "/%ff",
        "/v1/models/",
    ):
        error_of(api.http.get(path), 404)
    for method, path in (
        ("GET", CHAT),
        ("PUT", COMPLETIONS),
        ("DELETE", "/v1/models"),
        ("POST", "/health"),
        ("PATCH", CHAT),
    ):
        response = api.http.request(method, path)
        error_of(response, 405)
        assert response.headers["allow"]
    assert api.http.head("/health").status_code == 200
    assert api.http.get("/live").json() == {"status": "alive"}


def test_request_ids(api: Api) -> None:
    assert api.http.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    created = {api.http.get("/nowhere").headers["x-request-id"] for _ in range(3)}
    assert len(created) == 3
    for bad in ("a b", "x" * 129, ""):
        assert api.http.get("/live", headers={"x-request-id": bad}).headers["x-request-id"] != bad
    assert api.chat(stream=True).headers["x-request-id"]
