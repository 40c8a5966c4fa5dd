"""Short ways to ask the server under test, and what every answer must hold."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.serve.fake_llm import FakeLLM
from tests.serve.live_server import LiveServer

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


class Api:
    """The server under test as a client sees it, and the scripted model behind it."""

    def __init__(self, live: LiveServer, llm: FakeLLM) -> None:
        self.live = live
        self.llm = llm
        self.url = live.url
        self.http = httpx.Client(base_url=live.url, timeout=20)

    def chat(self, **body: Any) -> httpx.Response:
        return self.http.post(CHAT, json={"messages": [{"role": "user", "content": "hi"}], **body})

    def complete(self, **body: Any) -> httpx.Response:
        return self.http.post(COMPLETIONS, json={"prompt": "hi", **body})

    def chat_events(self, **body: Any) -> list[Any]:
        return events_of(self.chat(stream=True, **body))

    def complete_events(self, **body: Any) -> list[Any]:
        return events_of(self.complete(stream=True, **body))

    def still_serves(self) -> None:
        """The last step of every case: a plain request succeeds."""
        self.llm.reset()
        answer = self.chat(max_tokens=3)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"]


def events_of(response: httpx.Response) -> list[Any]:
    """The objects of a stream; it must be framed exactly and end with [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, rest = response.content.split(b"\n\n")
    assert rest == b""
    assert all(event.startswith(b"data: ") and b"\n" not in event for event in events)
    assert events[-1] == b"data: [DONE]"
    return [json.loads(event[len(b"data: ") :]) for event in events[:-1]]


def error_of(response: httpx.Response, status: int, param: str | None = None) -> str:
    """The message of an error that must have this status, and, where given, this param."""
    assert response.status_code == status, (response.status_code, response.text[:500])
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(response.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert param is None or error["param"] == param, error
    return error["message"]


def usage(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    """What an answer reports."""
    details = {"cached_tokens": cached}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
    }
