"""The life of the model inside a server: loading, ready, stopped. Owns the `AsyncLLM`; knows no routes."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace.serve.problems import Problem, stopping, unavailable

if TYPE_CHECKING:
    from headrace.engine.llm import AsyncLLM


class Service:
    """One model behind the server.

    `load` is called once, in a thread of its own, so that the server answers meanwhile. `name` is what the model is
    called, by default what it calls itself; then `alias` is accepted too. `loaded` is called on the event loop when
    loading has ended, with the model or with what went wrong.
    """

    def __init__(
        self,
        load: Callable[[], AsyncLLM],
        *,
        name: str | None = None,
        alias: str | None = None,
        loaded: Callable[[AsyncLLM | Exception], None] | None = None,
    ) -> None:
        self._load = load
        self._name = name
        self._alias = alias
        self._loaded = loaded
        self._llm: AsyncLLM | None = None
        self._failure: Exception | None = None
        self._stopping = False
        self.created = int(time.time())

    def start(self) -> None:
        """Begin to load; from the running event loop."""
        loop = asyncio.get_running_loop()
        # a daemon: a server that is stopped while it loads does not wait for the end of loading
        thread = threading.Thread(target=self._load_and_tell, args=(loop,), name="headrace-load", daemon=True)
        atexit.register(_leave_behind, thread)
        thread.start()

    def close(self) -> None:
        """Stop the model, if there is one. What still runs ends as aborted."""
        self._stopping = True
        if self._llm is not None:
            self._llm.close()

    def model(self) -> AsyncLLM:
        """The model, ready to answer; Problem 503 while there is none."""
        if self._stopping:
            raise stopping()
        if self._failure is not None:
            raise unavailable(f"the model could not be loaded: {self._failure}", "load_failed", retry=False)
        if self._llm is None:
            raise unavailable("the model is still loading", "model_loading", retry=True)
        if self._llm.dead is not None:
            raise unavailable(f"the engine has stopped: {self._llm.dead}", "engine_dead", retry=False)
        return self._llm

    def names(self, llm: AsyncLLM) -> tuple[str, ...]:
        """Names under which the model is served, the one the server was asked for first."""
        if self._name is not None:
            return (self._name,)
        return tuple(dict.fromkeys((self._alias or llm.model.name, llm.model.name)))

    def require(self, name: str | None, llm: AsyncLLM) -> str:
        """The name that an answer gives the model; Problem 404 for any that is not served. No name means this model."""
        names = self.names(llm)
        if name is None:
            return names[0]
        if name not in names:
            message = f"there is no model {name[:128]!r} here, only {', '.join(names)}"
            raise Problem(404, message, param="model", code="model_not_found")
        return name

    def fingerprint(self, llm: AsyncLLM) -> str:
        """Constant as long as the same model is served the same way."""
        facts = f"{llm.model.name} {llm.model.context}"
        return "fp_" + hashlib.sha256(facts.encode()).hexdigest()[:12]

    def described(self, name: str, llm: AsyncLLM) -> dict[str, Any]:
        """One entry of /v1/models."""
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "headrace",
            "max_model_len": llm.model.context,
        }

    def _load_and_tell(self, loop: asyncio.AbstractEventLoop) -> None:
        outcome: AsyncLLM | Exception
        try:
            outcome = self._load()
        except Exception as error:
            outcome = error
        except BaseException as error:  # a thread has nobody above it: what ends programs elsewhere is told here, too
            outcome = RuntimeError(f"loading ended with {error!r}")
            outcome.__cause__ = error
        try:
            loop.call_soon_threadsafe(self._take, outcome)
        except RuntimeError:  # the loop has ended: nobody will use the model
            if not isinstance(outcome, Exception):
                outcome.close()

    def _take(self, outcome: AsyncLLM | Exception) -> None:
        if isinstance(outcome, Exception):
            self._failure = outcome
        elif self._stopping:
            outcome.close()
            return
        else:
            self._llm = outcome
        if self._loaded is not None:
            self._loaded(outcome)


def _leave_behind(thread: threading.Thread) -> None:
    """End the process, at its end, where the thread still loads. Python would end a thread that comes back from native
    code by unwinding it, which C++ takes for a failure: the process would abort."""
    if thread.is_alive():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(0)
