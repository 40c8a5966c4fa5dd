"""The log: a line for each request, as text and as JSON, without texts unless asked; nothing waits for its reader."""

from __future__ import annotations

import io
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from headrace.serve.logs import LINES, event, logging_to
from headrace.serve.options import ServerOptions
from tests.serve.fake_llm import FakeLLM, Script
from tests.serve.http_api import CHAT, COMPLETIONS
from tests.serve.live_server import LiveServer, until

HELLO = [{"role": "user", "content": "hi, a secret"}]
KEY = "sk-0123456789"


@contextmanager
def logged(**options: Any) -> Iterator[tuple[str, FakeLLM, io.StringIO]]:
    """A server that logs."""
    stream, llm = io.StringIO(), FakeLLM()
    told = ServerOptions(**options)
    with logging_to(told, stream), LiveServer(lambda: llm, **options) as live:
        yield live.wait_ready().url, llm, stream


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json() -> None:
    headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": "my-id"}
    with logged(log_format="json", api_key=KEY) as (url, llm, stream):
        ask = {"messages": HELLO, "n": 2, "max_tokens": 2, "stream": True}
        assert httpx.post(url + CHAT + "?token=in-the-query", json=ask, headers=headers).status_code == 200
        httpx.post(url + CHAT, json={"messages": HELLO, "temperature": -1}, headers=headers)
        httpx.post(url + CHAT, json={"messages": HELLO})
        assert httpx.get(url + "/health").status_code == 200
    told = lines(stream)
    assert [line["event"] for line in told] == ["loading", "ready", "request", "request", "request", "stopped"]
    good, bad, unknown = (line for line in told if line["event"] == "request")
    assert good.pop("time").endswith("Z")
    assert 0 < good.pop("first_token_ms") <= good.pop("total_ms")
    assert good.pop("engine_ids") == [llm.streams[0].output.request_id]
    assert good == {
        "level": "info", "event": "request", "request_id": "my-id", "client": "127.0.0.1", "key": "default",
        "method": "POST", "path": CHAT, "status": 200, "model": "fake-model", "stream": True,
        "prompt_tokens": len(llm.submitted[0][0]), "completion_tokens": 4, "cached_tokens": 0,
        "finish_reasons": ["length", "length"],
    }  # fmt: skip
    assert (bad["status"], bad["error"], "finish_reasons" in bad) == (400, "invalid_value", False)
    assert (unknown["status"], unknown["error"], "key" in unknown) == (401, "invalid_api_key", False)
    for secret in (KEY, "a secret", "hello world", "in-the-query"):
        assert secret not in stream.getvalue()


def test_texts_where_asked_for() -> None:
    with logged(log_format="json", log_texts=True) as (url, _, stream):
        httpx.post(url + COMPLETIONS, json={"prompt": ["one", "two"], "n": 2, "max_tokens": 3})
    (line,) = [line for line in lines(stream) if line["event"] == "request"]
    assert line["prompts"] == ["one", "two"]
    assert line["answers"] == ["hello world, "] * 4


def test_text() -> None:
    with logged() as (url, _, stream):
        httpx.post(url + COMPLETIONS, json={"prompt": "x", "max_tokens": 2})
        httpx.get(url + "/a%0Ab%20%22c%1B[2J")
        logging.getLogger("headrace.test").warning("two\nlines \x1b[2J")
    said = stream.getvalue().splitlines()
    requests = [line for line in said if " request " in line]
    assert requests[0].split(" ", 1)[1].startswith("info request request_id=")
    assert (
        " path=/v1/completions status=200 model=fake-model stream=False prompt_tokens=1 completion_tokens=2 "
        in requests[0]
    )
    assert "finish_reasons=length" in requests[0]
    assert len(requests) == 2
    assert "\x1b" not in stream.getvalue()
    assert said[-2].endswith("warning two lines  [2J")


@pytest.mark.parametrize(("level", "count"), [("debug", 2), ("info", 1), ("warning", 0)])
def test_levels(level: str, count: int) -> None:
    with logged(log_level=level) as (url, _, stream):
        httpx.post(url + COMPLETIONS, json={"prompt": "x", "max_tokens": 2})
        httpx.get(url + "/live")
    said = stream.getvalue()
    assert said.count("path=/v1/completions") + said.count("path=/live") == count


def test_clients_that_leave_are_logged() -> None:
    with logged(log_format="json") as (url, llm, stream):
        llm.script = lambda prompt, choice: Script([120] * 400, 0.01)
        with httpx.stream("POST", url + CHAT, json={"messages": HELLO, "stream": True}) as response:
            next(response.iter_raw())
        until(lambda: all(one.aborted for one in llm.streams))
    (line,) = [line for line in lines(stream) if line["event"] == "request"]
    assert line["finish_reasons"] == ["abort"]
    assert 0 < line["completion_tokens"] < 400


def test_exceptions_are_one_object() -> None:
    stream = io.StringIO()
    with logging_to(ServerOptions(log_format="json"), stream):
        try:
            raise KeyError("x")
        except KeyError:
            logging.getLogger("headrace.test").exception("it failed")
    (line,) = lines(stream)
    assert (line["event"], line["message"], line["logger"]) == ("message", "it failed", "headrace.test")
    assert "KeyError" in line["exception"]


def test_a_reader_that_stands_still_holds_up_nobody() -> None:
    reading, writing = os.pipe()
    log = logging.getLogger("headrace.test")
    count = LINES + 5000
    with open(writing, "w", encoding="utf-8") as pipe:
        with logging_to(ServerOptions(log_format="json"), pipe):
            start = time.monotonic()
            for number in range(count):
                event(log, logging.INFO, "filler", {"number": number, "text": "x" * 100})
            assert time.monotonic() - start < 5
            got = bytearray()
            reader = threading.Thread(
                target=lambda: [got.extend(more) for more in iter(lambda: os.read(reading, 65536), b"")]
            )
            reader.start()
        pipe.close()
        reader.join(10)
    os.close(reading)
    told = [json.loads(line) for line in got.splitlines()]
    lost = sum(line["lost"] for line in told if line["event"] == "lines_lost")
    assert lost > 0
    assert lost + sum(line["event"] == "filler" for line in told) == count


def test_logging_is_as_before_afterwards() -> None:
    log = logging.getLogger("headrace")
    before = (list(log.handlers), log.level, log.propagate)
    with logging_to(ServerOptions(log_level="debug"), io.StringIO()):
        assert not log.propagate
    assert (list(log.handlers), log.level, log.propagate) == before
