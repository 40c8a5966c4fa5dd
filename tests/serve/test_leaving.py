"""Clients that leave or read slowly, engines that die, models that still load, servers that stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.errors import EngineDeadError, OptionError
from headrace.params import SamplingParams
from headrace.serve import connection
from headrace.serve.app import create_app, listening, run
from headrace.serve.connection import Connection
from headrace.serve.problems import Problem
from headrace.serve.service import Service
from tests.serve.fake_llm import FakeLLM, Script
from tests.serve.http_api import CHAT, COMPLETIONS, Api, error_of
from tests.serve.live_server import LiveServer, until

HELLO = [{"role": "user", "content": "hi"}]


def endless(llm: FakeLLM, step_s: float = 0.005) -> None:
    llm.script = lambda prompt, choice: Script([120] * 500, step_s)


# ---- clients


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_leaving_aborts_within_a_step(api: Api, path: str, stream: bool, several: bool) -> None:
    endless(api.llm)
    body: dict[str, Any] = {"stream": stream, "max_tokens": 400, "n": 2 if several else 1}
    body |= {"messages": HELLO} if path == CHAT else {"prompt": ["a", "b"] if several else "a"}
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", api.live.port), 5) as sock:
        sock.sendall(head.encode() + raw)
        until(lambda: api.llm.tokens_made > 8)
        if stream:
            assert b"data: " in sock.recv(10_000)
        left = time.monotonic()
    streams = 2 if several and path == COMPLETIONS else 1
    until(lambda: api.llm.aborts == streams)
    assert api.llm.aborted_at - left < 0.25
    made = api.llm.tokens_made
    time.sleep(0.05)
    assert api.llm.tokens_made == made, "nothing is computed for nobody"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("behind", [1, 5])
@pytest.mark.parametrize("reset", [False, True])
def test_leaving_with_requests_waiting_behind(api: Api, stream: bool, behind: int, reset: bool) -> None:
    """Pipelined: uvicorn by itself tells only the last one that the client has left."""
    endless(api.llm)
    raw = json.dumps({"prompt": "a", "stream": stream, "max_tokens": 400}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", api.live.port), 5) as sock:
        sock.sendall((head.encode() + raw) * (1 + behind))
        until(lambda: api.llm.tokens_made > 8)
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        left = time.monotonic()
    until(lambda: api.llm.aborts == 1)
    assert api.llm.aborted_at - left < 0.25
    time.sleep(0.05)
    assert len(api.llm.submitted) == 1, "nobody waits for the others"


def test_requests_behind_each_other_are_answered_in_order(api: Api) -> None:
    count = 3 * connection.AHEAD
    raws = [json.dumps({"prompt": "a", "max_tokens": 1 + n % 3}).encode() for n in range(count)]
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: "
    with socket.create_connection(("127.0.0.1", api.live.port), 10) as sock:
        sock.sendall(b"".join(f"{head}{len(raw)}\r\n\r\n".encode() + raw for raw in raws))
        got = b""
        while got.count(b'"completion_tokens":') < count:
            more = sock.recv(100_000)
            assert more, "the server went away"
            got += more
    told = [int(part.split(b",")[0].rstrip(b"}")) for part in got.split(b'"completion_tokens":')[1:]]
    assert told == [1 + n % 3 for n in range(count)]


def test_nothing_is_logged_for_clients_that_leave_many_streams(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    endless(api.llm, 0.0)
    raw = json.dumps({"prompt": "a", "stream": True, "max_tokens": 400, "n": 20}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    for _ in range(10):
        with socket.create_connection(("127.0.0.1", api.live.port), 5) as sock:
            sock.sendall((head.encode() + raw) * 2)
            sock.recv(100)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until(lambda: all(stream.aborted for stream in api.llm.streams))
    assert not caplog.records


HEADS = {
    "one header": (b"GET /live HTTP/1.1\r\nHost: x\r\nX: ", b"a" * 1000, True),
    "many headers": (b"GET /live HTTP/1.1\r\nHost: x\r\n", b"".join(b"X%d: y\r\n" % n for n in range(100)), True),
    "a path": (b"GET /", b"a" * 1000, True),
    "trailers": (
        b"POST /live HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n",
        b"X: " + b"a" * 995 + b"\r\n",
        False,
    ),
}


@pytest.mark.parametrize(("start", "more", "told"), HEADS.values(), ids=HEADS)
def test_endless_heads_are_cut(api: Api, start: bytes, more: bytes, told: bool) -> None:
    got = b""
    with socket.create_connection(("127.0.0.1", api.live.port), 5) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(start)
        for _ in range(20_000):
            sock.sendall(more)
            if select.select([sock], [], [], 0)[0]:
                got += (said := sock.recv(10_000))
                if not said:
                    break
        else:
            pytest.fail("20 MB of it were taken")
    assert not got or got.startswith(b"HTTP/1.1 431 " if told else b"HTTP/1.1 405 ")


def test_a_large_head_and_body_in_small_pieces_are_no_endless_head(api: Api) -> None:
    raw = json.dumps({"prompt": "a", "max_tokens": 1, "user": "u" * 200_000}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nX: {'a' * 60_000}\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", api.live.port), 5) as sock:
        sock.sendall(head.encode())
        sock.sendall(b"".join(b"1\r\n%c\r\n" % byte for byte in raw) + b"0\r\n\r\n")
        assert sock.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_a_read_allocates_what_was_sent_and_no_more(api: Api) -> None:
    """A quarter of a megabyte each time, as asyncio does it, tears the heap to pieces where many come and leave."""
    with socket.create_connection(("127.0.0.1", api.live.port), 5) as sock:
        for _ in range(3):
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
            sock.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b""
            while b"alive" not in answer:
                answer += sock.recv(1000)
            peak = tracemalloc.get_traced_memory()[1] - before
            tracemalloc.stop()
            assert peak < 2**17


def test_loops_of_two_threads_do_not_read_into_the_same_buffer() -> None:
    with ThreadPoolExecutor(1) as other:
        theirs = other.submit(lambda: connection._buffer.view).result()
    assert theirs.obj is not connection._buffer.view.obj


@pytest.mark.parametrize(
    "sent", [b"", b"GET /li", f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode()]
)
def test_clients_that_fall_silent_are_let_go(sent: bytes) -> None:
    llm = FakeLLM()
    endless(llm, 0.04)
    with LiveServer(lambda: llm, silence_s=1, keep_alive_s=1) as live:
        live.wait_ready()
        raw = json.dumps({"prompt": "a", "max_tokens": 50}).encode()
        whole = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw
        with (
            socket.create_connection(("127.0.0.1", live.port), 5) as silent,
            socket.create_connection(("127.0.0.1", live.port), 20) as waits,
        ):
            silent.sendall(sent)
            waits.sendall(whole)
            start = time.monotonic()
            assert silent.recv(100) == b""
            assert 0.8 < time.monotonic() - start < 3
            assert waits.recv(100).startswith(b"HTTP/1.1 200 "), "an answer may take longer"
            waits.sendall(sent)
            while waits.recv(10_000):
                pass


def test_more_connections_than_there_are_descriptors() -> None:
    """asyncio by itself logs thousands of tracebacks."""
    with Process(files=600) as process, contextlib.ExitStack() as held:
        url = process.url()
        port = int(url.rsplit(":", 1)[1])
        many = [held.enter_context(socket.create_connection(("127.0.0.1", port), 5)) for _ in range(700)]
        assert many[-1].recv(1000).startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        held.close()
        until(lambda: httpx.post(url + CHAT, json={"messages": HELLO}).status_code == 200)
        process.popen.send_signal(signal.SIGTERM)
        assert process.ended(5) == (0, "", "")


def test_leaving_before_the_first_token(api: Api) -> None:
    api.llm.script = lambda prompt, choice: Script([120], 30)
    for stream in (True, False):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(api.url + COMPLETIONS, json={"prompt": "x", "stream": stream}, timeout=0.2)
    until(lambda: api.llm.aborts == 2)


def test_leaving_while_tokenizing(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = api.llm.encode

    async def slow(text: str, params: SamplingParams, **how: Any) -> list[int]:
        await asyncio.sleep(0.5)
        return await encode(text, params, **how)

    monkeypatch.setattr(api.llm, "encode", slow)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(api.url + COMPLETIONS, json={"prompt": "x"}, timeout=0.1)
    time.sleep(0.6)
    assert not api.llm.submitted


def test_finished_requests_are_not_aborted(api: Api) -> None:
    api.chat()
    api.chat_events()
    api.complete_events(prompt=["a", "b"], n=2)
    assert api.llm.aborts == 0


def test_small_writes_are_not_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each answer on a connection that stays open waits 40 ms for the client's acknowledgement."""
    seen: list[int] = []
    watch = Connection._watch

    def noted(self: Connection) -> None:
        sock = self.transport.get_extra_info("socket")
        seen.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        watch(self)

    monkeypatch.setattr(Connection, "_watch", noted)
    with LiveServer(FakeLLM) as live:  # its socket does not say that it is TCP
        live.wait_ready()
    assert seen and all(seen)


def test_openai_style_close_of_a_stream(api: Api) -> None:
    endless(api.llm)
    with httpx.stream("POST", api.url + CHAT, json={"messages": HELLO, "stream": True}) as response:
        next(response.iter_raw())
    until(lambda: api.llm.aborts == 1)


def test_slow_reader_delays_nobody(api: Api) -> None:
    """A client that stops reading; its text is more than the buffers of both sides hold."""
    big = 257 - 2  # one token, logprobs make the events fat
    api.llm.script = lambda prompt, choice: Script([big] * 500, 0.0)
    body = json.dumps({"prompt": ["x"] * 10, "stream": True, "max_tokens": 500, "logprobs": 100}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", api.live.port))
        sock.sendall(head.encode() + body)
        time.sleep(0.3)
        api.llm.says("hello world, MONDAY")
        start = time.monotonic()
        for _ in range(5):
            assert api.chat().status_code == 200
            assert api.http.get("/health").status_code == 200
        assert time.monotonic() - start < 4
    until(lambda: all(stream.aborted for stream in api.llm.streams))


def test_health_is_quick_while_busy(api: Api) -> None:
    api.llm.script = lambda prompt, choice: Script([120] * 500, 0.002)

    def read() -> None:
        httpx.post(api.url + CHAT, json={"messages": HELLO, "stream": True, "max_tokens": 150})

    streams = [threading.Thread(target=read) for _ in range(4)]
    for stream in streams:
        stream.start()
    until(lambda: api.llm.tokens_made > 20)
    took = []
    for _ in range(20):
        start = time.monotonic()
        assert api.http.get("/health").status_code == 200
        took.append(time.monotonic() - start)
    for stream in streams:
        stream.join()
    assert sorted(took)[10] < 0.1


# ---- failures of the engine


def test_failure_in_the_middle(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    api.llm.script = lambda prompt, choice: Script([120] * 9, 0.0, fails_after=3 if choice else None)
    whole = api.chat(n=2)
    assert "not finite" in error_of(whole, 500)
    (said,) = [record for record in caplog.records if record.name.startswith("headrace")]
    assert said.levelname == "WARNING"
    assert (
        said.getMessage() == f"{api.llm.streams[0].output.request_id} could not be finished: the logits are not finite"
    )
    response = api.chat(n=2, stream=True)
    assert response.status_code == 200
    *_, last, rest = response.content.split(b"\n\n")
    assert rest == b""
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "not finite" in error["message"]
    assert b"[DONE]" not in response.content
    assert api.llm.aborts == 2, "what still ran was ended"


def test_unexpected_exceptions_are_500_without_details(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*about: Any, **how: Any) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(api.llm, "check", broken)
    for stream in (False, True):
        response = api.chat(stream=stream)
        message = error_of(response, 500)
        assert "secret" not in message
        assert "x-request-id" in response.headers
    monkeypatch.undo()

    async def breaks(self: Any) -> Any:
        raise KeyError("secret")

    monkeypatch.setattr("tests.serve.fake_llm.FakeStream.__anext__", breaks)
    error_of(api.chat(), 500)
    error_of(api.complete(prompt=["a", "b"]), 500)
    for response in (api.chat(stream=True), api.complete(prompt=["a", "b"], stream=True)):
        assert response.status_code == 200
        assert b"unexpected failure" in response.content
        assert b"secret" not in response.content
        assert b"[DONE]" not in response.content


@pytest.fixture
def own() -> Iterator[tuple[LiveServer, FakeLLM]]:
    """A server that a test may break."""
    llm = FakeLLM()
    with LiveServer(lambda: llm) as live:
        yield live.wait_ready(), llm
    assert llm.closed


def test_o5_dead_engine(own: tuple[LiveServer, FakeLLM]) -> None:
    live, llm = own
    endless(llm, 0.02)
    bodies: list[bytes] = []

    def read() -> None:
        bodies.append(httpx.post(live.url + CHAT, json={"messages": HELLO, "stream": True}, timeout=10).content)

    readers = [threading.Thread(target=read) for _ in range(3)]
    answers: list[httpx.Response] = []
    waiter = threading.Thread(
        target=lambda: answers.append(httpx.post(live.url + CHAT, json={"messages": HELLO}, timeout=10))
    )
    for thread in (*readers, waiter):
        thread.start()
    until(lambda: len(llm.streams) == 4 and llm.tokens_made > 8)
    loop = llm.streams[0].tasks[0].get_loop()
    loop.call_soon_threadsafe(llm.die, "a step failed")
    for thread in (*readers, waiter):
        thread.join(2)
        assert not thread.is_alive(), "no stream hangs"
    for body in bodies:
        last = body.rstrip().split(b"\n\n")[-1]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_dead"
    error_of(answers[0], 503)
    for response in (
        httpx.get(live.url + "/health"),
        httpx.get(live.url + "/v1/models"),
        httpx.post(live.url + CHAT, json={"messages": HELLO}),
        httpx.post(live.url + COMPLETIONS, json={"prompt": "x"}),
    ):
        assert "a step failed" in error_of(response, 503)
        assert response.elapsed.total_seconds() < 0.5
    assert httpx.get(live.url + "/live").status_code == 200


def test_o5_engine_that_dies_unnoticed(own: tuple[LiveServer, FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """`dead` is not yet set when the request is posted."""
    live, _ = own
    monkeypatch.setattr(FakeLLM, "start", lambda self, *about, **more: (_ for _ in ()).throw(_dead()))
    error_of(httpx.post(live.url + CHAT, json={"messages": HELLO, "stream": True}), 503)


def _dead() -> Exception:
    return EngineDeadError("gone")


# ---- loading


def test_o5_loading() -> None:
    go = threading.Event()
    llm = FakeLLM()

    def load() -> FakeLLM:
        go.wait(10)
        return llm

    with LiveServer(load) as live:
        try:
            for _ in range(2):
                for response in (
                    httpx.get(live.url + "/health"),
                    httpx.get(live.url + "/v1/models"),
                    httpx.get(live.url + "/v1/models/x"),
                    httpx.post(live.url + CHAT, json={"messages": HELLO}),
                    httpx.post(live.url + COMPLETIONS, content=b"\xff" * 1000),
                ):
                    error_of(response, 503)
                    assert response.json()["error"]["code"] == "model_loading"
                    assert int(response.headers["retry-after"]) >= 1
                    assert response.elapsed.total_seconds() < 0.5
                assert httpx.get(live.url + "/live").status_code == 200
        finally:
            go.set()
        live.wait_ready()
        assert httpx.post(live.url + CHAT, json={"messages": HELLO}).status_code == 200
    assert llm.closed


def test_failed_loading() -> None:
    def load() -> FakeLLM:
        raise ValueError("broken file")

    with LiveServer(load) as live:
        until(lambda: httpx.get(live.url + "/health").json()["error"]["code"] == "load_failed")
        assert "broken file" in error_of(httpx.get(live.url + "/health"), 503)


class Panic(BaseException):
    """As Rust's panics come out of tokenizers."""


@pytest.mark.parametrize("error", [SystemExit(3), Panic("a hole")])
def test_loading_that_ends_badly_is_failed_loading(error: BaseException) -> None:
    def load() -> FakeLLM:
        raise error

    with LiveServer(load) as live:
        until(lambda: httpx.get(live.url + "/health").json()["error"]["code"] == "load_failed")
        assert repr(error) in error_of(httpx.get(live.url + "/health"), 503)
    with pytest.raises(RuntimeError, match="loading ended with"):
        run(load, host="127.0.0.1", port=0)


def test_loaded_is_called_before_the_server_says_ready(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []

    def loaded() -> None:
        said.append(capsys.readouterr().out)
        os.kill(os.getpid(), signal.SIGTERM)

    otherwise = threading.Timer(5, os.kill, (os.getpid(), signal.SIGTERM))
    otherwise.start()
    try:
        run(FakeLLM, host="127.0.0.1", port=0, loaded=loaded)
    finally:
        otherwise.cancel()
    assert said == [""]
    assert capsys.readouterr().out.startswith("ready: ")


def test_stopping_while_loading_does_not_wait() -> None:
    go = threading.Event()
    llm = FakeLLM()

    def load() -> FakeLLM:
        go.wait(10)
        return llm

    start = time.monotonic()
    with LiveServer(load):
        pass
    assert time.monotonic() - start < 3
    go.set()
    until(lambda: llm.closed)


def test_model_that_comes_too_late_is_closed() -> None:
    """Loaded while the server already stops, its event loop still running."""
    go = threading.Event()
    llm = FakeLLM()
    service = Service(lambda: (go.wait(5), llm)[1])

    async def stops() -> None:
        service.start()
        service.close()
        go.set()
        while not llm.closed:
            await asyncio.sleep(0.005)
        with pytest.raises(Problem, match="stopping"):
            service.model()

    asyncio.run(asyncio.wait_for(stops(), 5))


def test_a_program_that_ends_while_a_model_loads_keeps_its_exit_code() -> None:
    code = """
import asyncio, sys, time
from headrace.serve.service import Service

async def leaves():
    Service(lambda: time.sleep(1)).start()

asyncio.run(leaves())
sys.exit(3)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 3


def test_names() -> None:
    llm = FakeLLM()
    with LiveServer(lambda: llm, name="org/mine") as live:
        live.wait_ready()
        listed = httpx.get(live.url + "/v1/models").json()["data"]
        assert [one["id"] for one in listed] == ["org/mine"]
        assert httpx.get(live.url + "/v1/models/org/mine").json()["id"] == "org/mine"
        assert httpx.post(live.url + CHAT, json={"messages": HELLO, "model": "org/mine"}).json()["model"] == "org/mine"
        error_of(httpx.post(live.url + CHAT, json={"messages": HELLO, "model": "fake-model"}), 404, "model")
    assert Service(lambda: llm, alias="fake").names(llm) == ("fake", "fake-model")
    assert Service(lambda: llm, alias="fake-model").names(llm) == ("fake-model",)


# ---- the process


PROCESS = """
    import sys, time
    import numpy as np
    sys.path.insert(0, {here!r})
    from tests.serve.fake_llm import FakeLLM, Script
    from headrace.errors import HeadraceError
    from headrace.serve.app import ending_in_time, run
    from headrace.serve.options import ServerOptions
    what, port, grace = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    def load():
        if what == "slow":
            time.sleep(60)
        if what == "packs":
            from headrace import native
            threads, lines = native.Threads(2), bytes(4 * 2048 * 2048)
            print("packing", flush=True)
            while True:
                native.Packed("F32", 2048, 2048).fill(np.frombuffer(lines, np.uint8), threads)
        if what == "fails":
            raise HeadraceError("no such file")
        llm = FakeLLM()
        if what == "endless":
            llm.script = lambda prompt, choice: Script([120] * 500, 0.2)
        return llm
    try:
        with ending_in_time():
            run(load, host="127.0.0.1", port=port, options=ServerOptions(grace_s=grace))
    except HeadraceError as error:
        sys.exit(f"error: {{error}}")
"""


class Process:
    """A server in a process of its own."""

    def __init__(self, what: str = "plain", port: int = 0, grace: int = 5, files: int = 1024) -> None:
        code = textwrap.dedent(PROCESS).format(here=str(Path(__file__).parents[2]))
        self.popen = subprocess.Popen(
            [sys.executable, "-c", code, what, str(port), str(grace)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)),
        )

    def ready(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline()

    def url(self) -> str:
        return self.ready().split()[1].removesuffix("/v1")

    def ended(self, seconds: float) -> tuple[int, str, str]:
        out, err = self.popen.communicate(timeout=seconds)
        return self.popen.returncode, out, err

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *about: object) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.communicate()


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_in_order(sig: int) -> None:
    with Process() as process:
        line = process.ready()
        assert line.startswith("ready: http://127.0.0.1:")
        assert "fake-model" in line
        assert "512" in line
        url = line.split()[1].removesuffix("/v1")
        with httpx.Client(base_url=url) as client:
            assert client.post(CHAT, json={"messages": HELLO}).status_code == 200  # the connection stays open
            process.popen.send_signal(sig)
            assert process.ended(5) == (0, "", "")


def test_running_streams_get_a_grace_then_an_error_event() -> None:
    with Process("endless", grace=1) as process:
        url = process.url()
        got: list[bytes] = []

        def read(most: int, stream: bool) -> None:
            body = {"messages": HELLO, "stream": stream, "max_tokens": most}
            got.append(httpx.post(url + CHAT, json=body, timeout=20).content)

        readers = [threading.Thread(target=read, args=args) for args in ((3, True), (400, True), (400, False))]
        for reader in readers:
            reader.start()
        time.sleep(0.3)
        process.popen.send_signal(signal.SIGTERM)
        code, _, err = process.ended(6)
        for reader in readers:
            reader.join(5)
        assert code == 0, err
        assert "Traceback" not in err, err
    got.sort(key=len)
    finished = next(body for body in got if b"[DONE]" in body)
    assert b'"finish_reason":"length"' in finished
    rest = [body for body in got if body is not finished]
    assert len(rest) == 2
    for body in rest:
        last = body.rstrip().split(b"\n\n")[-1].removeprefix(b"data: ")
        assert json.loads(last)["error"]["code"] == "stopping"


def test_bodies_that_do_not_come_end_quietly_with_the_server() -> None:
    with Process(grace=1) as process:
        port = int(process.url().rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), 10) as sock:
            sock.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
            time.sleep(0.3)
            process.popen.send_signal(signal.SIGTERM)
            answer = b""
            while more := sock.recv(10_000):
                answer += more
        code, _, err = process.ended(6)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b'"code":"stopping"' in answer
    assert code == 0
    assert "Traceback" not in err, err


@pytest.mark.parametrize("what", ["endless", "slow", "half a body"])
def test_second_signal_does_not_wait(what: str) -> None:
    port = _free_port()
    with Process("slow" if what == "slow" else "endless", port, grace=60) as process:
        until(lambda: _answers(port), 20)
        url = f"http://127.0.0.1:{port}"
        if what != "slow":
            until(lambda: httpx.get(url + "/health").status_code == 200)
        reader = threading.Thread(target=lambda: _swallow(url))
        if what == "endless":
            reader.start()
        with socket.create_connection(("127.0.0.1", port), 5) as half:
            half.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{{".encode())
            time.sleep(0.5)
            process.popen.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            if what != "slow":
                assert process.popen.poll() is None, "a running stream has its grace"
            process.popen.send_signal(signal.SIGTERM)
            code, _, err = process.ended(5)
        if what == "endless":
            reader.join(5)
        assert (code, err) == (0, "")


def _swallow(url: str) -> None:
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(url + CHAT, json={"messages": HELLO, "stream": True}, timeout=20)


def test_sigterm_while_loading() -> None:
    with Process("slow") as process:
        time.sleep(1.5)
        process.popen.send_signal(signal.SIGTERM)
        assert process.ended(5)[0] == 0


def test_sigterm_while_native_code_loads() -> None:
    for twice in (False, True):
        with Process("packs") as process:
            assert process.ready() == "packing\n"
            process.popen.send_signal(signal.SIGTERM)
            if twice:
                process.popen.send_signal(signal.SIGTERM)
            assert process.ended(10) == (0, "", "")


def test_failed_loading_ends_the_process() -> None:
    with Process("fails") as process:
        assert process.ended(10) == (1, "", "error: no such file\n")


def test_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Process("slow", port) as process:
            code, out, err = process.ended(10)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: cannot listen at 127.0.0.1 port {port}")
    assert err.count("\n") == 1


def test_addresses_that_cannot_be_used_are_told_before_anything_is_loaded() -> None:
    def never() -> Any:
        raise AssertionError("nothing may be loaded")

    taken = listening("127.0.0.1", 0)  # as by a server that only just begins
    with taken, pytest.raises(OptionError, match="--port"):
        run(never, host="127.0.0.1", port=taken.getsockname()[1])
    for host in ("no.such.host.invalid", "a..b", "a" * 100):
        with pytest.raises(OptionError, match="no address"):
            run(never, host=host, port=8000)


def test_second_server_is_refused_while_the_first_loads() -> None:
    with Process("slow", port := _free_port()) as first:
        until(lambda: _answers(port), 10)
        with Process("slow", port) as second:
            assert second.ended(10)[0] == 1
        assert first.popen.poll() is None


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/live").status_code == 200
    except httpx.HTTPError:
        return False


def test_port_is_free_at_once_afterwards() -> None:
    """Though the server closed a connection first, which the system remembers for a minute."""
    with Process() as process, httpx.Client() as kept:
        url = process.url()
        kept.post(url + CHAT, json={"messages": HELLO})
        process.popen.send_signal(signal.SIGTERM)
        process.ended(5)
    with Process(port=int(url.rsplit(":", 1)[1])) as again:
        assert again.url() == url


def handlers() -> list[Any]:
    return [signal.getsignal(sig) for sig in signal.valid_signals()]


def test_o3_the_application_installs_no_signal_handlers() -> None:
    """Whoever runs it says what signals mean."""

    async def lives() -> None:
        before = handlers()
        app = create_app(FakeLLM)
        given = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
        told: list[str] = []

        async def receive() -> Any:
            assert handlers() == before
            await asyncio.sleep(0.2)
            return given.pop(0)

        async def send(message: Any) -> None:
            assert handlers() == before
            told.append(message["type"])

        await app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)
        assert told == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
        assert handlers() == before

    asyncio.run(lives())
