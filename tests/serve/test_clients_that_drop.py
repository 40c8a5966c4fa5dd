"""Case K6 over HTTP, on a tiny model behind the real server: 500 clients that drop, in every state that there is."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace import AsyncLLM
from headrace.execute.plan import Masks, Plan, Result
from tests.exact.watched import ANSWERING, PARTLY_DONE, QUEUED, READING, Watched
from tests.models.tiny import tiny_checkpoint
from tests.serve.http_api import COMPLETIONS
from tests.serve.live_server import LiveServer, until

UNSENT = "between its last token and [DONE]"
PROXY = "behind a proxy that has lost patience"
CLIENTS = {QUEUED: 120, READING: 100, ANSWERING: 100, PARTLY_DONE: 80, UNSENT: 20, PROXY: 80}
AT_ONCE = 40
ROWS = 8
READ = 300
"""Tokens of the prompt of who leaves in the midst of it: at least ten steps."""
LONG = 900
STEP_S = 0.004
"""So long a step takes at least, so that clients have the time to leave in a state that they saw."""
PATIENCE_S = 0.15
"""Of the proxy."""


class House:
    """A server with its engine, and what the engine's thread did."""

    def __init__(self, folder: Path) -> None:
        self.kept: list[AsyncLLM] = []
        self.last = 0.0
        """When the last client left."""
        self.users: dict[int, int] = {}
        """By a client's number the engine's name for its request, once it is there."""
        self.states: dict[int, set[str]] = {}
        """What the requests that live are, by the client's number."""
        self.live = LiveServer(lambda: self.load(folder))
        self.live._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # what is not read stays with the server

    def load(self, folder: Path) -> AsyncLLM:
        llm = AsyncLLM(folder, threads=1, pool_bytes=1 << 22, budget=32, rows=ROWS, past_load=False)
        self.watched = Watched(llm.model)
        executor = llm.model._engine._executor
        run = executor.run

        def as_slow_as_a_larger_model(plan: Plan, masks: Masks | None = None) -> Result:
            time.sleep(STEP_S)
            return run(plan, masks)

        executor.run = as_slow_as_a_larger_model  # type: ignore[method-assign]
        self.kept.append(llm)
        return llm

    @property
    def llm(self) -> AsyncLLM:
        return self.kept[0]

    async def look(self) -> None:
        """Keep `users` and `states` up to date."""
        scheduler = self.watched.scheduler
        while True:
            found: dict[int, set[str]] = {}
            for r in [*scheduler.running, *scheduler.waiting]:
                number = r.tokens[0] + 256 * r.tokens[1]
                self.users[number] = r.user
                found.setdefault(number, set()).update(self.watched.states(r))
            self.states = found
            await asyncio.sleep(0.002)

    def is_empty(self) -> bool:
        stats = self.llm.stats()
        busy = stats.running, stats.waiting, stats.blocks_used
        return busy == (0, 0, 0) and not self.llm._sinks and not self.live._server.server_state.connections


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("drops")
    made = tiny_checkpoint(folder, "llama", max_position_embeddings=2048, num_hidden_layers=1)
    house = House(made)
    with house.live as live:
        live.wait_ready(60)
        yield house


def body(number: int, state: str) -> dict[str, Any]:
    """Nobody's prompt begins as another's; nobody comes to an end before it leaves."""
    asked: dict[str, Any] = {"prompt": [number % 256, number // 256, *[7] * 10], "max_tokens": LONG}
    asked |= {"temperature": 8, "seed": number, "ignore_eos": True, "stream": number % 2 == 0}
    if state == READING:
        asked["prompt"] += [number % 256] * READ
    if state == PARTLY_DONE:
        asked |= {"n": 4, "stop_token_ids": list(range(0, 256, 12))}
    if state == UNSENT:
        asked |= {"logprobs": 20, "stream": True, "max_tokens": 150}
    return asked


async def connected(port: int, *, deaf: bool) -> socket.socket:
    """`deaf`: hardly anything can be sent that the client has not read."""
    sock = socket.socket()
    if deaf:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    return sock


async def leave(house: House, number: int, state: str, port: int, seen: Counter[str]) -> None:
    """Ask, wait for the state, and go: every third with a reset, or as the proxy decides."""
    raw = json.dumps(body(number, state)).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
    sock = await connected(port, deaf=state == UNSENT)
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(sock, head + raw)
        if state == PROXY:
            told = b""
            while more := await loop.sock_recv(sock, 10_000):
                told += more
            seen[state] += b" 504 " in told or told.startswith(b"HTTP/1.1 200")
            return
        while number not in house.users or (number in house.states and state not in house.states[number]):
            if state == QUEUED and number in house.states:
                break  # there was a seat for it
            await asyncio.sleep(0.001)
        seen[state] += house.users[number] in house.llm._sinks if state == UNSENT else number in house.states
        if number % 3 == 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    finally:
        sock.close()
        house.last = time.monotonic()


async def relay(port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A proxy as they are in front of servers: one answer for each connection, 504 after `PATIENCE_S` without it, or
    the connection closed where it has begun."""
    upstream, down = await asyncio.open_connection("127.0.0.1", port)
    begun = False

    async def forth() -> None:
        while data := await reader.read(10_000):
            down.write(data)

    async def back() -> None:
        nonlocal begun
        while data := await upstream.read(10_000):
            begun = True
            writer.write(data)

    both = asyncio.gather(forth(), back())
    with suppress(TimeoutError):
        await asyncio.wait_for(both, PATIENCE_S)
    if not begun:
        writer.write(b"HTTP/1.1 504 Gateway Timeout\r\nContent-Length: 0\r\n\r\n")
    down.close()
    writer.close()


async def drop_all(house: House) -> Counter[str]:
    """How many left in which state."""
    seen: Counter[str] = Counter()
    states = [state for state, count in CLIENTS.items() for _ in range(count)]
    seats = asyncio.Semaphore(AT_ONCE)
    proxy = await asyncio.start_server(lambda r, w: relay(house.live.port, r, w), "127.0.0.1", 0)
    behind = proxy.sockets[0].getsockname()[1]

    async def one(number: int, state: str) -> None:
        async with seats:
            await leave(house, number, state, behind if state == PROXY else house.live.port, seen)

    looking = asyncio.create_task(house.look())
    async with proxy:
        await asyncio.gather(*(one(n, states[n * 179 % len(states)]) for n in range(len(states))))
    looking.cancel()
    return seen


def test_k6_500_clients_that_drop(house: House) -> None:
    assert sum(CLIENTS.values()) == 500
    plain = {"prompt": [5, 6, 7], "max_tokens": 30, "temperature": 8, "seed": 1, "ignore_eos": True}
    with httpx.Client(base_url=house.live.url, timeout=60) as http:
        before = http.post(COMPLETIONS, json=plain).json()["choices"]
    until(house.is_empty)
    seen = asyncio.run(asyncio.wait_for(drop_all(house), 100))
    until(house.is_empty)
    assert time.monotonic() - house.last < 1
    for state, count in CLIENTS.items():
        assert seen[state] > 0.7 * count, state
    for state in (QUEUED, READING, ANSWERING, PARTLY_DONE):
        assert house.watched.left[state] > 0.7 * CLIENTS[state], "what it was when the engine heard of it"
    steps = house.llm.stats().steps
    time.sleep(0.2)
    assert house.llm.stats().steps == steps, "nothing is computed for nobody"
    with httpx.Client(base_url=house.live.url, timeout=60) as http:
        assert http.post(COMPLETIONS, json=plain).json()["choices"] == before
