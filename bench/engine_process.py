"""The engine in a process of its own, to be compared with the thread that the server has: `Apart` is an `AsyncLLM`.

Messages go there and deltas come back pickled through a pipe, a list of deltas for each step, as they are posted and
delivered inside one process. It is for measuring (`over_http.py`, `streams.py`) what that would cost and bring.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, cast

from headrace import AsyncLLM
from headrace.config import Options
from headrace.constrain.compiler import Compiler
from headrace.engine import build, llm
from headrace.engine.gate import Gate
from headrace.engine.loop import Engine
from headrace.errors import EngineDeadError
from headrace.loading.resolve import resolve
from headrace.scheduler.messages import Delta, Message
from headrace.scheduler.scheduler import Stats


class Far:
    """`engine.loop.Engine`, as far as `Loaded` uses one, over a pipe."""

    def __init__(self, model: str, options: dict[str, Any], deliver: Callable[[list[Delta]], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, model, options), daemon=True)
        self._process.start()
        other.close()
        self._stats: Stats = self._pipe.recv()
        self._deliver = deliver
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def post(self, message: Message) -> None:
        with self._lock:
            self._pipe.send(message)

    def failure(self) -> BaseException | None:
        return None if self._process.is_alive() else EngineDeadError("its process has ended")

    def stats(self) -> Stats:
        """As of the last step that told anything."""
        return self._stats

    def close(self) -> None:
        with contextlib.suppress(OSError), self._lock:
            self._pipe.send(None)
        self._process.join()

    def stop(self) -> None:
        self.close()

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                deltas, self._stats = self._pipe.recv()
                self._deliver(deltas)


def _serve(pipe: Connection, model: str, options: dict[str, Any]) -> None:
    """The other process."""

    def deliver(deltas: list[Delta]) -> None:
        pipe.send((deltas, loaded.stats()))

    loaded = build.load(model, deliver=deliver, **options)
    pipe.send(loaded.stats())
    while (message := pipe.recv()) is not None:
        loaded._engine.post(message)
    loaded.close()


class Apart(AsyncLLM):
    """Everything but the engine is here."""

    def __init__(self, model: str, **options: Any) -> None:
        self._sinks = {}
        self._pool = ThreadPoolExecutor(2)
        self._long = ThreadPoolExecutor(1)
        self._grammars = ThreadPoolExecutor(1)
        self._closed = False
        plan = build.plan_engine(resolve(model), Options.of(**options))
        far = cast(Engine, Far(model, options, llm._weakly(self._deliver)))
        gate = Gate(plan.options.scheduler.queue_requests, plan.options.scheduler.queue_tokens)
        compiler = Compiler(plan.checkpoint.tokenizer, plan.program.vocab, plan.checkpoint.eos)
        self.model = build.Loaded(plan, far, gate, compiler)
