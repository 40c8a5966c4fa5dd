"""A server in a process of its own for what measures it: its port, its figures, the lag of its event loop."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import socket
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import uvicorn

from headrace import AsyncLLM
from headrace.hardware import resident
from headrace.scheduler.scheduler import Stats
from headrace.serve.app import configured, create_app
from headrace.serve.options import ServerOptions

LAG_S = 0.01
"""The event loop is asked so often to do something; how much later it does is its lag."""


@dataclass(frozen=True)
class Facts:
    """Of the server, now."""

    stats: Stats
    memory: int
    """Bytes resident, of the server's process."""
    cpu_s: float
    """Of the server's process so far."""
    files: int
    """Open ones, sockets among them."""
    lags: list[float]
    """Seconds, since the last time they were asked for."""


def files_up() -> None:
    """As many open files as the system lets this process have: the usual 1,024 are too few for the connections."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def opened(model: str, engine: str, options: dict[str, Any]) -> AsyncLLM:
    """`engine`: thread or process."""
    if engine == "thread":
        return AsyncLLM(model, **options)
    from bench.engine_process import Apart

    return Apart(model, **options)


def _serve(pipe: Connection, model: str, engine: str, options: dict[str, Any]) -> None:
    """The other process: sends its port, then `Facts` whenever it gets True, until it gets False."""
    files_up()
    llm, lags = opened(model, engine, options), list[float]()
    how = ServerOptions(grace_s=1)
    app = create_app(lambda: llm, name="model", options=how)
    server = uvicorn.Server(configured(app, how))

    async def watch() -> None:
        while not server.should_exit:
            begin = time.perf_counter()
            await asyncio.sleep(LAG_S)
            lags.append(time.perf_counter() - begin - LAG_S)

    async def run(listening: socket.socket) -> None:
        await asyncio.gather(server.serve([listening]), watch())

    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listening:
        thread = threading.Thread(target=lambda: asyncio.run(run(listening)))
        thread.start()
        while not server.started:
            time.sleep(0.01)
        pipe.send(listening.getsockname()[1])
        while pipe.recv():
            now, found = resident(), list(lags)
            del lags[: len(found)]
            files = len(os.listdir("/proc/self/fd"))
            pipe.send(Facts(llm.stats(), now.total if now else 0, time.process_time(), files, found))
        server.should_exit = True
        thread.join()
    llm.close()


class Server:
    """The process, as its clients have it."""

    def __init__(self, model: str, engine: str, options: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, model, engine, options), daemon=engine == "thread")
        self._process.start()
        other.close()
        self.port: int = self._pipe.recv()
        self.url = f"http://127.0.0.1:{self.port}"

    def facts(self) -> Facts:
        self._pipe.send(True)
        found: Facts = self._pipe.recv()
        return found

    def close(self) -> None:
        self._pipe.send(False)
        self._process.join()


def share(values: list[float], part: float) -> float:
    """The value that `part` of them do not exceed."""
    ordered = sorted(values) or [0.0]
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]
