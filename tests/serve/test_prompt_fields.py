"""Fields that say what becomes of a prompt and how long an answer may take: suffix, truncate_prompt_tokens, timeout_s;
and content parts that are refused by name."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from headrace.serve.messages import PARTS
from tests.serve.fake_llm import BOS, CONTEXT, EOS, TURN, Script
from tests.serve.http_api import CHAT, COMPLETIONS, Api, error_of, events_of
from tests.serve.live_server import until

FIM = (256, 257, 258)


def prompt_of(api: Api) -> list[int]:
    """Of the latest request."""
    return api.llm.submitted[-1][0]


# ---- suffix


def test_suffix_fills_in_the_middle(api: Api) -> None:
    api.llm.tokenizer.fim = FIM
    answer = api.complete(prompt="ab", suffix="é", max_tokens=3)
    assert answer.status_code == 200, answer.text
    assert prompt_of(api) == [256, *b"ab", 257, *"é".encode(), 258]
    assert answer.json()["usage"]["prompt_tokens"] == 7
    assert api.complete(prompt="", suffix="x").status_code == 200
    assert prompt_of(api) == [256, 257, *b"x", 258]
    assert api.complete(prompt=["a", "b"], suffix="x", stream=True).status_code == 200
    assert [ids for ids, _ in api.llm.submitted[-2:]] == [[256, *p, 257, *b"x", 258] for p in (b"a", b"b")]
    api.llm.tokenizer.add_bos = True
    assert api.complete(prompt="a", suffix="x").status_code == 200
    assert prompt_of(api) == [BOS, 256, *b"a", 257, *b"x", 258]


def test_names_of_control_tokens_around_a_gap_are_text(api: Api) -> None:
    api.llm.tokenizer.fim = FIM
    assert api.complete(prompt="<|turn|>", suffix="<|end|>").status_code == 200
    assert prompt_of(api) == [256, *b"<|turn|>", 257, *b"<|end|>", 258]
    assert api.complete(prompt="<|turn|>", suffix="<|end|>", parse_special=True).status_code == 200
    assert prompt_of(api) == [256, TURN, 257, EOS, 258]


@pytest.mark.parametrize("empty", ["", None])
def test_an_empty_suffix_is_none(api: Api, empty: str | None) -> None:
    assert api.complete(prompt="<|turn|>", suffix=empty, echo=True).status_code == 200
    assert prompt_of(api) == [TURN]


def test_what_goes_with_no_suffix(api: Api) -> None:
    error_of(api.complete(suffix="x"), 400, "suffix")
    api.llm.tokenizer.fim = FIM
    error_of(api.complete(prompt=[1, 2], suffix="x"), 400, "suffix")
    error_of(api.complete(suffix=1), 400, "suffix")
    error_of(api.complete(suffix="x", echo=True), 400, "echo")
    error_of(api.complete(suffix="x", overflow="sinks"), 400, "overflow")
    error_of(api.complete(suffix="x", truncate_prompt_tokens=5), 400, "truncate_prompt_tokens")
    error_of(api.chat(suffix="x"), 400, "suffix")
    assert api.llm.submitted == []


# ---- truncate_prompt_tokens


@pytest.mark.parametrize(("asked", "left"), [(5, 5), (-1, CONTEXT - 4), (CONTEXT - 4, CONTEXT - 4)])
def test_the_last_tokens_of_a_prompt_are_read(api: Api, asked: int, left: int) -> None:
    long = [n % 250 for n in range(900)]
    answer = api.complete(prompt=long, truncate_prompt_tokens=asked, max_tokens=4)
    assert answer.status_code == 200, answer.text
    assert prompt_of(api) == long[-left:]
    assert answer.json()["usage"]["prompt_tokens"] == left
    assert api.complete(prompt=[1, 2], truncate_prompt_tokens=asked, max_tokens=4).status_code == 200
    assert prompt_of(api) == [1, 2]


def test_of_a_conversation_too(api: Api) -> None:
    talk = [{"role": "user", "content": "x" * 900}]
    answer = api.chat(messages=talk, truncate_prompt_tokens=20, max_tokens=2)
    assert answer.status_code == 200, answer.text
    assert prompt_of(api) == [*b"x" * 18, EOS, TURN]


def test_echo_shows_what_was_read(api: Api) -> None:
    choice = api.complete(prompt="abcdef", truncate_prompt_tokens=2, echo=True, logprobs=0, max_tokens=1).json()[
        "choices"
    ][0]
    assert choice["text"].startswith("ef")
    assert choice["logprobs"]["tokens"][:2] == ["e", "f"]
    assert choice["logprobs"]["token_logprobs"][0] is None


def test_max_tokens_that_is_not_named_fits(api: Api) -> None:
    long = [1] * 900
    assert api.complete(prompt=long, truncate_prompt_tokens=CONTEXT - 3).status_code == 200
    assert api.llm.submitted[-1][1].max_tokens == 3
    assert api.complete(prompt=long, truncate_prompt_tokens=-1).status_code == 200
    assert api.llm.submitted[-1][1].max_tokens == 16
    assert len(prompt_of(api)) == CONTEXT - 16


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("value", [0, -2, 1.5, "5", True, CONTEXT + 1, 2**40])
def test_what_is_no_number_of_last_tokens(api: Api, path: str, value: Any) -> None:
    ask = api.chat if path == CHAT else api.complete
    error_of(ask(truncate_prompt_tokens=value), 400, "truncate_prompt_tokens")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_truncation_and_overflow_exclude_each_other(api: Api, path: str) -> None:
    ask = api.chat if path == CHAT else api.complete
    error_of(ask(truncate_prompt_tokens=5, overflow="truncate-middle"), 400, "truncate_prompt_tokens")
    assert ask(truncate_prompt_tokens=5, overflow="error").status_code == 200


# ---- timeout_s


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_request_that_takes_too_long(api: Api, path: str) -> None:
    ask = api.chat if path == CHAT else api.complete
    api.llm.says("hello world, and so on", step_s=0.05)
    begun = time.monotonic()
    answer = ask(timeout_s=0.2, n=2)
    assert 0.19 < time.monotonic() - begun < 2
    error_of(answer, 408)
    assert answer.json()["error"]["code"] == "timeout"
    assert answer.headers["x-should-retry"] == "false"
    assert api.llm.aborts == 1
    made = api.llm.tokens_made
    time.sleep(0.15)
    assert api.llm.tokens_made == made, "nothing runs on"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_that_takes_too_long(api: Api, path: str) -> None:
    """What came until then stays, and the last event says why no more comes."""
    body = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": ["a", "b"]}
    api.llm.says("hello world, and so on", step_s=0.04)
    answer = api.http.post(path, json={**body, "stream": True, "timeout_s": 0.2})
    assert answer.status_code == 200
    *events, rest = answer.content.split(b"\n\n")
    assert rest == b""
    told = [json.loads(event.removeprefix(b"data: ")) for event in events]
    assert told[-1]["error"]["code"] == "timeout"
    assert len(told) > 3
    assert not any(choice["finish_reason"] for event in told[:-1] for choice in event["choices"])
    until(lambda: api.llm.aborts == len(api.llm.streams))


def test_time_in_the_tokenizer_counts(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*args: Any, **options: Any) -> list[int]:
        time.sleep(0.3)
        return [1]

    monkeypatch.setattr(api.llm.tokenizer, "encode", slow)
    error_of(api.complete(timeout_s=0.05), 408)
    assert api.llm.submitted == []


def test_time_enough_changes_nothing(api: Api) -> None:
    plain = api.complete(seed=1).json()["choices"]
    assert api.complete(seed=1, timeout_s=60).json()["choices"] == plain
    assert api.complete(seed=1, timeout_s=86_400.0).json()["choices"] == plain
    events_of(api.chat(stream=True, timeout_s=5))
    api.llm.script = lambda ids, choice: Script([])
    assert api.llm.aborts == 0


@pytest.mark.parametrize("value", [0, -1, 86_401, "1", True, 1e308])
def test_what_is_no_time(api: Api, value: Any) -> None:
    error_of(api.complete(timeout_s=value), 400, "timeout_s")
    error_of(api.chat(timeout_s=value), 400, "timeout_s")


# ---- content parts


@pytest.mark.parametrize("kind", sorted(PARTS))
def test_parts_are_refused_by_name(api: Api, kind: str) -> None:
    parts = [{"type": "text", "text": "x"}, {"type": kind, kind: {"url": "data:,"}}]
    message = error_of(api.chat(messages=[{"role": "user", "content": parts}]), 400, "messages[0].content[1].type")
    assert kind in message and "not supported" in message
