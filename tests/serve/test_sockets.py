"""What stands around HTTP: TLS, CORS, limits of connections and bodies, clients that do not read."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState

from headrace.engine import async_llm
from headrace.errors import OptionError
from headrace.execute.plan import Masks, Plan, Result
from headrace.serve.app import configured, create_app
from headrace.serve.connection import Connection
from headrace.serve.options import ServerOptions
from headrace.serve.tls import tls_context
from tests.serve.fake_llm import FakeLLM, Script
from tests.serve.http_api import CHAT, COMPLETIONS, error_of
from tests.serve.live_server import LiveServer, until
from tests.serve.test_engine_path import loaded

HELLO = [{"role": "user", "content": "hi"}]


# ---- TLS


def made(folder: Path, name: str, *how: str) -> tuple[str, str]:
    """A certificate that signs itself, and its key."""
    cert, key = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-out", cert, "-keyout", key,
         *(how or ("-nodes",))],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return cert, key


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return made(tmp_path_factory.mktemp("tls"), "server")


def test_https(pair: tuple[str, str]) -> None:
    cert, key = pair
    trust = ssl.create_default_context(cafile=cert)
    with LiveServer(FakeLLM, tls_cert=cert, tls_key=key) as live, httpx.Client(base_url=live.url, verify=trust) as http:
        assert live.url.startswith("https://")
        until(lambda: http.get("/health").status_code == 200)
        assert http.post(CHAT, json={"messages": HELLO}).status_code == 200
        stream = http.post(CHAT, json={"messages": HELLO, "stream": True})
        assert stream.content.endswith(b"data: [DONE]\n\n")
        with pytest.raises(httpx.HTTPError):
            httpx.get(live.url.replace("https", "http") + "/live")
        assert http.get("/live").status_code == 200
    context = tls_context(ServerOptions(tls_cert=cert, tls_key=key))
    assert context is not None
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_files_that_cannot_be_used_are_named(pair: tuple[str, str], tmp_path: Path) -> None:
    cert, key = pair
    junk = tmp_path / "junk.pem"
    junk.write_text("no certificate", encoding="utf-8")
    other = made(tmp_path, "other")[1]
    locked = made(tmp_path, "locked", "-passout", "pass:secret")
    for options, option, words in (
        ((str(tmp_path / "none"), key), "tls_cert", "cannot be read: No such file"),
        ((cert, str(tmp_path / "none")), "tls_key", "cannot be read: No such file"),
        ((str(junk), key), "tls_cert", "holds no certificate"),
        ((cert, str(junk)), "tls_key", "holds no private key"),
        ((cert, other), "tls_key", "is not the key of the certificate"),
        (locked, "tls_key", "is encrypted"),
    ):
        with pytest.raises(OptionError, match=words) as caught:
            tls_context(ServerOptions(tls_cert=options[0], tls_key=options[1]))
        assert caught.value.option == option
    with pytest.raises(OptionError, match="tls_cert needs tls_key"):
        ServerOptions(tls_cert=cert)


# ---- CORS


def preflight(url: str, origin: str) -> httpx.Response:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-stainless-os"}
    return httpx.options(url + CHAT, headers={"Origin": origin, **asked})


def test_cors_is_off() -> None:
    with LiveServer(FakeLLM) as live:
        live.wait_ready()
        answer = httpx.post(live.url + CHAT, json={"messages": HELLO}, headers={"Origin": "https://a.example"})
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert preflight(live.url, "https://a.example").status_code == 405


def test_cors_for_some_origins_without_a_key() -> None:
    origins = ("https://a.example", "http://localhost:3000")
    with LiveServer(FakeLLM, cors_origin=origins, api_key="sk-0123456789") as live:
        live.wait_ready()
        for origin in origins:
            answer = preflight(live.url, origin)
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == origin
            assert "POST" in answer.headers["access-control-allow-methods"]
            assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
            refused = httpx.post(live.url + CHAT, json={"messages": HELLO}, headers={"Origin": origin})
            assert refused.status_code == 401
            assert refused.headers["access-control-allow-origin"] == origin, "so that the page can read the error"
        other = preflight(live.url, "https://evil.example")
        assert other.status_code == 400
        assert "access-control-allow-origin" not in other.headers
        headers = {"Origin": origins[0], "Authorization": "Bearer sk-0123456789"}
        good = httpx.post(live.url + CHAT, json={"messages": HELLO, "stream": True}, headers=headers)
        assert good.content.endswith(b"data: [DONE]\n\n")
        assert "x-request-id" in good.headers["access-control-expose-headers"]


@pytest.mark.parametrize("bad", ["a.example", "https://a.example/", "https://a.example/x", "", "ftp://x"])
def test_origins_are_judged(bad: str) -> None:
    with pytest.raises(OptionError, match="without a path"):
        ServerOptions(cors_origin=(bad,))


# ---- limits


def test_limits_are_options() -> None:
    with LiveServer(FakeLLM, body_bytes=2000, head_bytes=4096, connections=3) as live:
        live.wait_ready()
        assert "2000 bytes" in error_of(httpx.post(live.url + COMPLETIONS, json={"prompt": "x" * 3000}), 413)
        with socket.create_connection(("127.0.0.1", live.port), 5) as sock:
            sock.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 80_000)
            assert sock.recv(1000).startswith(b"HTTP/1.1 431 ")
        until(lambda: not live._server.server_state.connections)
        held = [socket.create_connection(("127.0.0.1", live.port), 5) for _ in range(3)]
        until(lambda: len(live._server.server_state.connections) == 3)
        with socket.create_connection(("127.0.0.1", live.port), 5) as sock:
            assert b"too_many_connections" in sock.recv(1000)
        for one in held:
            one.close()
        until(lambda: not live._server.server_state.connections)
        assert httpx.get(live.url + "/live").status_code == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [("body_bytes", 0), ("head_bytes", 10), ("grace_s", -1), ("silence_s", 0), ("connections", 0), ("unread_s", True),
     ("log_format", "xml"), ("log_level", "all"), ("on_engine_failure", "sleep"), ("engine_restarts", 0)],
)  # fmt: skip
def test_options_are_judged(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=name) as caught:
        ServerOptions(**{name: value})
    assert caught.value.option == name


def test_connections_that_nothing_is_asked_on_are_closed() -> None:
    with LiveServer(FakeLLM, keep_alive_s=1) as live:
        live.wait_ready()
        with socket.create_connection(("127.0.0.1", live.port), 5) as sock:
            sock.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            got, start = b"", time.monotonic()
            while more := sock.recv(1000):
                got += more
            assert got.startswith(b"HTTP/1.1 200 ")
            assert 0.5 < time.monotonic() - start < 4


# ---- clients that do not read


def deaf(port: int, path: str, body: dict[str, Any], receive: int = 2048) -> socket.socket:
    """Asks, and reads nothing."""
    raw = json.dumps(body).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    sock.settimeout(10)
    sock.connect(("127.0.0.1", port))
    sock.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)
    return sock


def test_who_reads_nothing_is_let_go() -> None:
    llm = FakeLLM()
    llm.script = lambda prompt, choice: Script([120] * 500, 0.002)
    with LiveServer(lambda: llm, unread_s=1) as live:
        live._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        live.wait_ready()
        ask = {"prompt": "x", "stream": True, "max_tokens": 480, "logprobs": 100}
        with deaf(live.port, COMPLETIONS, ask) as sock:
            until(lambda: bool(llm.streams))
            start = time.monotonic()
            until(lambda: not live._server.server_state.connections, 10)
            assert time.monotonic() - start > 0.9
            until(lambda: llm.streams[0].aborted)
            got = b"".join(iter(lambda: sock.recv(100_000), b""))
            assert got.startswith(b"HTTP/1.1 200 ")
            assert b"[DONE]" not in got


def test_who_reads_slowly_is_not() -> None:
    """Much slower than the answer comes, but some of it in every second."""
    llm = FakeLLM()
    llm.script = lambda prompt, choice: Script([120] * 500, 0.0)
    with LiveServer(lambda: llm, unread_s=1) as live:
        live._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        live.wait_ready()
        with deaf(live.port, COMPLETIONS, {"prompt": "x", "stream": True, "max_tokens": 80, "logprobs": 100}) as sock:
            got, start = b"", time.monotonic()
            while not got.endswith(b"0\r\n\r\n"):
                more = sock.recv(10_000)
                assert more
                got += more
                time.sleep(0.03)
            assert time.monotonic() - start > 2
        assert got.count(b"data: ") == 81
        assert b"data: [DONE]" in got


def test_who_has_read_in_between_is_not_let_go() -> None:
    """Though as much waits for it as before: more came."""
    later: list[Any] = []
    transport = SimpleNamespace(waits=0, aborted=False)
    transport.get_write_buffer_size = lambda: transport.waits
    transport.abort = lambda: setattr(transport, "aborted", True)
    loop: Any = SimpleNamespace(call_later=lambda seconds, call: (later.append(call), call)[1])
    options = ServerOptions()
    config = configured(create_app(FakeLLM), options)
    connection = Connection(options, config=config, server_state=ServerState(), app_state={}, _loop=loop)
    connection.transport, connection.flow = transport, FlowControl(transport)  # type: ignore[assignment, arg-type]
    transport.waits = 70_000
    connection.pause_writing()
    transport.waits = 10_000
    connection.resume_writing()
    transport.waits = 80_000
    connection.pause_writing()
    later.pop()()
    assert not transport.aborted
    later.pop()()
    assert transport.aborted
    assert not later


def test_whole_answers_that_nobody_takes_are_let_go() -> None:
    llm = FakeLLM()
    llm.script = lambda prompt, choice: Script([120] * 500, 0.0)
    with LiveServer(lambda: llm, unread_s=1, keep_alive_s=1) as live:
        live._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        live.wait_ready()
        with deaf(live.port, COMPLETIONS, {"prompt": "x", "max_tokens": 200, "logprobs": 100}):
            until(lambda: len(live._server.server_state.connections) == 1)
            until(lambda: not live._server.server_state.connections, 10)


@pytest.fixture
def real() -> Iterator[tuple[LiveServer, async_llm.AsyncLLM]]:
    """The real engine's streams, its steps as slow as a small model's: else an answer is done before anybody reads."""
    fake, kept = FakeLLM(), list[async_llm.AsyncLLM]()
    fake.script = lambda prompt, choice: Script([120] * 480)

    def load() -> async_llm.AsyncLLM:
        kept.append(async_llm.AsyncLLM("scripted"))
        executor = kept[0].model._engine._executor
        run = executor.run

        def slowly(plan: Plan, masks: Masks | None = None) -> Result:
            time.sleep(0.003)
            return run(plan, masks)

        executor.run = slowly
        return kept[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_llm, "load", lambda model, *, deliver, **_: loaded(fake, deliver))
        with LiveServer(load, unread_tokens=2000) as live:
            live._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            yield live.wait_ready(), kept[0]


def test_what_is_not_read_is_bounded(real: tuple[LiveServer, async_llm.AsyncLLM]) -> None:
    """Far behind, a stream ends with an error; it neither goes on in the engine nor keeps what was made."""
    live, llm = real
    ask = {"prompt": "x", "stream": True, "max_tokens": 450, "logprobs": 20, "ignore_eos": True}
    with deaf(live.port, COMPLETIONS, ask) as sock:
        until(lambda: llm.stats().aborts == 1, 20)
        assert llm.stats().tokens_out < 400
        until(lambda: not llm.stats().running)
        got = b""
        while not got.endswith(b"0\r\n\r\n"):
            more = sock.recv(100_000)
            assert more
            got += more
    last = got.split(b"data: ")[-1]
    assert b'"code":"read_too_slowly"' in last
    assert b"[DONE]" not in got
    assert httpx.post(live.url + COMPLETIONS, json={"prompt": "x", "max_tokens": 400}).status_code == 200
    whole = {"prompt": "x", "max_tokens": 400, "logprobs": 20, "ignore_eos": True}
    assert httpx.post(live.url + COMPLETIONS, json=whole, timeout=30).status_code == 200, "only who streams is bounded"


# ---- what stands around a request


def told(port: int, sent: bytes, pieces: int = 1) -> list[tuple[int, Any]]:
    """Status and body of each answer to what is sent, until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        size = -(-len(sent) // pieces)
        for at in range(0, len(sent), size):
            sock.sendall(sent[at : at + size])
            time.sleep(0.02 if pieces > 1 else 0)
        raw = b"".join(iter(lambda: sock.recv(2**16), b""))
    answers = []
    while raw:
        head, _, rest = raw.partition(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        answers.append((int(head.split()[1]), json.loads(rest[:length])))
        raw = rest[length:]
    return answers


def asking(prompt: str, *headers: str, close: bool = False) -> bytes:
    body = json.dumps({"prompt": prompt, "max_tokens": 1, "echo": True}).encode()
    lines = [f"POST {COMPLETIONS} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    lines += ["Connection: close"] if close else []
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


OFFER = (
    "Connection: Upgrade, HTTP2-Settings",
    "Upgrade: h2c",
    "HTTP2-Settings: AAEAAEAAAAIAAAAB",
)


@pytest.mark.parametrize("pieces", [1, 2, 40])
def test_another_protocol_that_is_offered_is_declined(pieces: int) -> None:
    """As Java's client does with each first request to a server; the body is still the request's."""
    with LiveServer(FakeLLM) as live:
        live.wait_ready()
        sent = asking("a", *OFFER) + asking("b") + asking("c", *OFFER) + asking("d", close=True)
        answers = told(live.port, sent, pieces)
    assert [status for status, _ in answers] == [200] * 4
    assert [body["choices"][0]["text"][0] for _, body in answers] == list("abcd")


def test_tunnels_are_refused() -> None:
    with LiveServer(FakeLLM) as live:
        live.wait_ready()
        with socket.create_connection(("127.0.0.1", live.port), timeout=10) as sock:
            sock.sendall(b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\nabc")
            assert b" 400 " in sock.recv(2**16)
        assert httpx.get(live.url + "/health").status_code == 200


def test_a_trailer_is_no_header() -> None:
    """A proxy in front has judged the headers; nothing may come in behind its back."""
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n"
    chunks = b"\r\n%x\r\n%b\r\n0\r\n" % (len(body), body)
    key = "Authorization: Bearer sk-0123456789\r\n"
    with LiveServer(FakeLLM, api_key="sk-0123456789") as live:
        live.wait_ready()
        ((status, _),) = told(live.port, head.encode() + chunks + key.encode() + b"\r\n")
        assert status == 401
        ((status, _),) = told(live.port, (head + key).encode() + chunks + b"X-Sum: 1\r\n\r\n")
        assert status == 200
