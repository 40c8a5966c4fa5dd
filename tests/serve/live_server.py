"""A real uvicorn on a free port, in a thread."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import uvicorn

from headrace.serve.app import configured, create_app
from headrace.serve.options import ServerOptions


def until(holds: Callable[[], bool], seconds: float = 5) -> None:
    """Waits for what must come true soon."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class LiveServer:
    """Serves what `load` makes; `with LiveServer(...) as live` waits until it listens, not until it is ready."""

    def __init__(self, load: Callable[[], Any], *, name: str | None = None, **options: Any) -> None:
        """`options` are those of `ServerOptions`."""
        self.options = ServerOptions(**{"grace_s": 1, **options})
        self.app = create_app(load, name=name, options=self.options)
        self._server = uvicorn.Server(configured(self.app, self.options))
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.port = self._sock.getsockname()[1]
        self.url = f"{self.options.scheme}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.run, args=([self._sock],), daemon=True)

    def __enter__(self) -> LiveServer:
        self._thread.start()
        deadline = time.monotonic() + 10
        while not self._server.started:
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.005)
        return self

    def __exit__(self, *about: object) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive(), "the server did not stop"

    def wait_ready(self, seconds: float = 10) -> LiveServer:
        deadline = time.monotonic() + seconds
        while httpx.get(self.url + "/health").status_code != 200:
            assert time.monotonic() < deadline, "the server did not become ready"
            time.sleep(0.01)
        return self
