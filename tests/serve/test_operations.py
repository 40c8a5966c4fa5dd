"""Cases O3, O4 and O5 on a server in a process of its own: how it ends, and what follows when its engine dies."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import uuid
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace import AsyncLLM
from headrace.execute.plan import Plan, Result
from headrace.serve.app import _freeze, listening
from tests.models.tiny import tiny_checkpoint
from tests.serve.http_api import CHAT, COMPLETIONS
from tests.serve.live_server import LiveServer, until
from tests.serve.server_process import LONG_S, Process, status
from tests.serve.test_sockets import made as certificate

HELLO = [{"role": "user", "content": "hi"}]


class Reader:
    """A client that reads a stream to its end."""

    def __init__(self, url: str, most: int = 300) -> None:
        self.body = b""
        self.ended: float | None = None
        self._ask = {"messages": HELLO, "stream": True, "max_tokens": most}
        self._thread = threading.Thread(target=self._read, args=(url,))
        self._thread.start()

    def _read(self, url: str) -> None:
        with httpx.stream("POST", url + CHAT, json=self._ask, timeout=30) as response:
            for chunk in response.iter_raw():
                self.body += chunk
        self.ended = time.monotonic()

    def last(self) -> Any:
        """What the last event says."""
        self._thread.join(20)
        assert not self._thread.is_alive(), "the stream hangs"
        *_, event, rest = self.body.split(b"\n\n")
        assert rest == b""
        return event.removeprefix(b"data: ")

    def error(self) -> str:
        return str(json.loads(self.last())["error"]["code"])


def reading(url: str, count: int, most: int = 300) -> list[Reader]:
    readers = [Reader(url, most) for _ in range(count)]
    until(lambda: all(reader.body for reader in readers), 20)
    return readers


@pytest.mark.parametrize("how", ["raise", "vanish"])
def test_o5_engine_dies_and_the_process_ends(tmp_path: Path, how: str) -> None:
    """Within a second: every stream has its error, /health and new requests are 503, the exit code is 1."""
    with Process(tmp_path) as process:
        url = process.url()
        readers = reading(url, 3)
        with httpx.Client(base_url=url) as kept:
            assert kept.get("/health").status_code == 200
            seen: list[tuple[int, int]] = []
            process.fail(how)
            until(lambda: not (tmp_path / how).exists())
            start = time.monotonic()
            while process.popen.poll() is None and time.monotonic() < start + 5:
                try:
                    seen.append(
                        (kept.get("/health").status_code, kept.post(CHAT, json={"messages": HELLO}).status_code)
                    )
                except httpx.HTTPError:
                    time.sleep(0.005)
            gone = time.monotonic()
        assert [reader.error() for reader in readers] == ["engine_dead"] * 3
        assert all(reader.ended is not None and reader.ended - start < 1 for reader in readers)
        assert gone - start < 2, "the engine is told dead within 0.1 s; what remains is the end of Python itself"
        assert (503, 503) in seen
        assert set(seen[1:]) <= {(503, 503)}, "never green again"
        code, told, rest = process.ended(5)
    assert code == 1
    assert "error: the engine has stopped" in rest
    (failure,) = [line for line in told if line["event"] == "engine_failed"]
    assert failure["then"] == "end"
    assert ("injected" if how == "raise" else "its thread has ended") in failure["reason"]
    ends = [line for line in told if line["event"] == "request" and line["path"] == CHAT and line["status"] == 200]
    assert [line["error"] for line in ends] == ["engine_dead"] * 3


def test_o5_engine_dies_and_is_started_again(tmp_path: Path) -> None:
    with Process(tmp_path, on_engine_failure="restart", engine_restarts=2) as process:
        url = process.url()
        for times in (1, 2):
            readers = reading(url, 2)
            process.fail()
            start = time.monotonic()
            assert [reader.error() for reader in readers] == ["engine_dead"] * 2
            assert time.monotonic() - start < 1
            until(lambda: status(url) == 200, 5)
            assert httpx.post(url + CHAT, json={"messages": HELLO, "max_tokens": 2}).status_code == 200
            page = httpx.get(url + "/metrics").text
            assert f"headrace_engine_failures_total {times}.0" in page
            assert f"headrace_engine_restarts_total {times}.0" in page
        readers = reading(url, 1)
        process.fail()
        assert readers[0].error() == "engine_dead"
        code, told, _ = process.ended(5)
    assert code == 1, "a third time within ten minutes is too much"
    assert [line["then"] for line in told if line["event"] == "engine_failed"] == ["restart", "restart", "end"]


def test_o5_not_ready_while_it_is_loaded_again(tmp_path: Path) -> None:
    with Process(tmp_path, on_engine_failure="restart") as process:
        url = process.url()
        (tmp_path / "slow").touch()
        readers = reading(url, 1)
        process.fail()
        assert readers[0].error() == "engine_dead"
        until(lambda: status(url) == 503)
        answer = httpx.post(url + CHAT, json={"messages": HELLO})
        assert answer.json()["error"]["code"] == "engine_restarting"
        assert int(answer.headers["retry-after"]) >= 1
        assert status(url, "/live") == 200
        process.signal()
        assert process.ended(5)[0] == 0


def test_o5_a_model_that_cannot_be_loaded_again_ends_the_process(tmp_path: Path) -> None:
    with Process(tmp_path, on_engine_failure="restart") as process:
        url = process.url()
        (tmp_path / "broken").touch()
        readers = reading(url, 1)
        process.fail()
        assert readers[0].error() == "engine_dead"
        code, _, rest = process.ended(5)
    assert (code, "error: no such model" in rest) == (1, True)


def test_a_restart_gives_memory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole engine goes, with what hangs on it in cycles, though it was frozen for the garbage collector."""
    monkeypatch.setattr(logging.getLogger("headrace.engine.loop"), "disabled", True)  # pytest keeps what is logged
    folder = tiny_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    kept: list[weakref.ref[Any]] = []

    def load() -> AsyncLLM:
        llm = AsyncLLM(folder, threads=1, pool_bytes=1 << 22, past_load=False)
        kept.append(weakref.ref(llm.model._engine._executor))  # it holds weights and pool
        return llm

    def breaks(plan: Plan, masks: Any = None) -> Result:
        raise RuntimeError("injected")

    try:
        with LiveServer(load, on_engine_failure="restart") as live:
            for times in (1, 2):
                live.wait_ready(30)
                ask = {"prompt": [5] * 20, "max_tokens": 3}
                assert httpx.post(live.url + COMPLETIONS, json=ask, timeout=30).status_code == 200
                _freeze()
                executor: Any = kept[-1]()
                executor.run = breaks
                del executor
                assert httpx.post(live.url + COMPLETIONS, json=ask, timeout=30).json()["error"]["code"] == "engine_dead"
                until(lambda times=times: len(kept) > times, 30)
                assert [found() is None for found in kept[:-1]] == [True] * times
            live.wait_ready(30)
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_o3_eight_streams_run_to_their_end_and_four_wait(tmp_path: Path, sig: int) -> None:
    """Readiness goes at once, new requests get 503 while connections are still taken; the queue is served too."""
    with Process(tmp_path, grace_s=20) as process:
        url = process.url()
        readers = reading(url, 8, most=60)
        queued = [Reader(url, most=5) for _ in range(4)]
        until(lambda: "headrace_http_requests_running 13" in httpx.get(url + "/metrics").text)
        process.signal(sig)
        start = time.monotonic()
        until(lambda: status(url) == 503, 0.5)
        answer = httpx.post(url + CHAT, json={"messages": HELLO})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stopping")
        assert time.monotonic() - start < 1
        assert status(url, "/live") == 200
        assert [reader.last() for reader in (*readers, *queued)] == [b"[DONE]"] * 12
        code, told, rest = process.ended(5)
        assert time.monotonic() - start < 15
    assert (code, rest) == (0, "")
    assert [line["event"] for line in told if line["event"] != "request"] == [
        "loading", "ready", "draining", "stopped",
    ]  # fmt: skip


def test_o3_what_is_not_done_in_time_gets_an_error(tmp_path: Path) -> None:
    with Process(tmp_path, grace_s=1) as process:
        url = process.url()
        readers = reading(url, 8)
        queued = [Reader(url) for _ in range(4)]
        until(lambda: "headrace_http_requests_running 13" in httpx.get(url + "/metrics").text)
        process.signal()
        start = time.monotonic()
        assert {reader.error() for reader in (*readers, *queued)} == {"stopping"}
        code, told, rest = process.ended(5)
        assert 0.9 < time.monotonic() - start < 2.5
    assert (code, rest) == (0, "")
    assert not [line for line in told if line["level"] in ("warning", "error")]
    ends = [line for line in told if line["event"] == "request" and line["path"] == CHAT]
    assert [line["error"] for line in ends] == ["stopping"] * 12


def test_o3_a_second_signal_ends_it_now_and_the_port_is_free(tmp_path: Path) -> None:
    with Process(tmp_path, grace_s=60) as process:
        url = process.url()
        readers = reading(url, 2)
        process.signal()
        until(lambda: status(url) == 503)
        assert process.popen.poll() is None
        process.signal()
        start = time.monotonic()
        code, told, rest = process.ended(3)
        assert time.monotonic() - start < 1.5
        assert {reader.error() for reader in readers} <= {"stopping", "aborted"}
    assert (code, rest) == (0, "")
    assert not [line for line in told if line["level"] in ("warning", "error")]
    with Process(tmp_path, port=int(url.rsplit(":", 1)[1])) as again:
        assert again.url() == url
        assert status(url) == 200


@pytest.mark.parametrize("signals", [1, 2])
def test_o3_while_a_grammar_compiles(tmp_path: Path, signals: int) -> None:
    (tmp_path / "compiles").touch()
    asked = {"messages": HELLO, "response_format": {"type": "json_object"}}
    with Process(tmp_path, grace_s=1 if signals == 1 else 30) as process, ThreadPoolExecutor(3) as clients:
        url = process.url()
        answers = [clients.submit(httpx.post, url + CHAT, json=asked, timeout=30) for _ in range(3)]
        until(lambda: "headrace_http_requests_running 4" in httpx.get(url + "/metrics").text)
        time.sleep(0.2)
        for _ in range(signals):
            process.signal()
            time.sleep(0.2)
        start = time.monotonic()
        code, told, rest = process.ended(10)
        assert time.monotonic() - start < 5
        assert {(one.result().status_code, one.result().json()["error"]["code"]) for one in answers} == {
            (503, "stopping")
        }
    assert (code, rest) == (0, "")
    assert not [line for line in told if line["level"] in ("warning", "error")]


def test_o3_nobody_holds_up_the_end_by_not_reading(tmp_path: Path) -> None:
    (tmp_path / "fast").touch()
    with Process(tmp_path, grace_s=1, unread_tokens=10**9) as process:
        port = int(process.url().rsplit(":", 1)[1])
        many = {"prompt": ["x"] * 32, "stream": True, "max_tokens": 400, "logprobs": 100, "ignore_eos": True}
        body = json.dumps(many).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            deaf.connect(("127.0.0.1", port))
            deaf.sendall(head + body)
            time.sleep(3)
            process.signal()
            start = time.monotonic()
            code, told, rest = process.ended(10)
            assert 0.9 < time.monotonic() - start < 4, told
    assert (code, rest) == (0, "")
    assert not [line for line in told if line["level"] in ("warning", "error")]


def test_o3_an_idle_tls_connection_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """Its client never says goodbye."""
    cert, key = certificate(tmp_path, "server")
    with Process(tmp_path, tls_cert=cert, tls_key=key) as process:
        url = process.url()
        assert url.startswith("https://")
        trust = ssl.create_default_context(cafile=cert)
        with (
            socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), 5) as plain,
            trust.wrap_socket(plain, server_hostname="127.0.0.1") as idle,
        ):
            idle.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert idle.recv(1000).startswith(b"HTTP/1.1 200 ")
            process.signal()
            start = time.monotonic()
            code, told, rest = process.ended(8)
            assert time.monotonic() - start < 3
    assert (code, rest) == (0, "")
    assert not [line for line in told if line["level"] in ("warning", "error")]


def test_o5_health_is_quick_while_many_are_answered(tmp_path: Path) -> None:
    with Process(tmp_path) as process:
        url = process.url()
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(httpx.post, url + CHAT, json={"messages": HELLO, "max_tokens": 60}) for _ in range(8)]
            took = []
            for _ in range(10):
                start = time.monotonic()
                assert status(url) == 200
                took.append(time.monotonic() - start)
            assert all(answer.result().status_code == 200 for answer in asked)
    assert sorted(took)[5] < 0.2


def test_o5_health_is_quick_while_one_step_takes_seconds(tmp_path: Path) -> None:
    """As a long prompt's may."""
    with Process(tmp_path) as process, ThreadPoolExecutor(1) as pool:
        url = process.url()
        (tmp_path / "long").touch()
        asked = pool.submit(httpx.post, url + CHAT, json={"messages": HELLO, "max_tokens": 2}, timeout=30)
        until(lambda: not (tmp_path / "long").exists())
        took = []
        for path in 5 * ("/health", "/v1/models", "/metrics", "/live"):
            start = time.monotonic()
            assert status(url, path) == 200
            took.append(time.monotonic() - start)
        assert sorted(took)[len(took) // 2] < 0.1
        assert max(took) < LONG_S / 3
        assert not asked.done(), "the step has ended"
        assert asked.result().status_code == 200


def processes_with(mark: str) -> list[int]:
    """Those that have inherited an environment with this text."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if mark.encode() in file.read_bytes():
                found.append(int(file.parent.name))
    return found


@pytest.mark.parametrize("when", ["loading", "answering"])
def test_o4_nothing_is_left_when_the_process_is_killed(tmp_path: Path, when: str) -> None:
    """Neither processes nor shared memory, and the port can be had again. A whole server with a real engine."""
    folder = tiny_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    mark = f"killed-{uuid.uuid4()}"
    command = [sys.executable, "-m", "headrace", "serve", str(folder), "--port", "0", "--pool-bytes", f"{1 << 24}"]
    popen = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"HEADRACE_MARK": mark}
    )
    try:
        assert popen.stdout is not None and popen.stderr is not None
        reader = None
        if when == "loading":
            assert any(" loading" in line for line in popen.stderr)
        else:
            url = popen.stdout.readline().split()[1].removesuffix("/v1")
            reader = threading.Thread(target=left_alone, args=(url,))
            reader.start()
            until(lambda: "headrace_http_requests_running 2" in httpx.get(url + "/metrics").text)
        assert processes_with(mark) == [popen.pid], "the engine is a thread"
        assert "/dev/shm" not in Path(f"/proc/{popen.pid}/maps").read_text(encoding="utf-8")
    finally:
        popen.kill()
        popen.communicate()
    until(lambda: not processes_with(mark))
    if reader is not None:
        reader.join(5)
        assert not reader.is_alive()
        listening("127.0.0.1", int(url.rsplit(":", 1)[1])).close()


def left_alone(url: str) -> None:
    """A client whose server goes away."""
    body = {"prompt": "x", "stream": True, "max_tokens": 400, "n": 100, "ignore_eos": True}
    with pytest.raises(httpx.HTTPError):
        httpx.post(url + COMPLETIONS, json=body, timeout=30)


def test_the_unit_file_in_the_docs_is_sound() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    unit = re.search(r"```ini\n(\[Unit\].*?)```", page, re.DOTALL)
    assert unit is not None
    (command,) = re.findall(r"^ExecStart=(.*)$", unit[1], re.MULTILINE)
    from headrace.cli.options import option_name
    from headrace.serve.options import ServerOptions

    known = {option_name(name) for name in ServerOptions.__dataclass_fields__} | {"--host", "--port"}
    assert set(re.findall(r"--[a-z-]+", command)) <= known
