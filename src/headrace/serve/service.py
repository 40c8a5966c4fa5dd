"""The life of the model inside a server: loading, ready, failed and loaded again, stopped. Owns the `AsyncLLM`; knows
no routes."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace.errors import EngineDeadError
from headrace.serve.logs import event
from headrace.serve.metrics import EngineNow
from headrace.serve.options import RESTARTS_S
from headrace.serve.problems import Problem, stopping, unavailable

if TYPE_CHECKING:
    from headrace.engine.async_llm import AsyncLLM

_log = logging.getLogger("headrace.server")


WATCH_S = 0.05
"""How often it is looked whether the engine lives."""


GONE_S = 1.0
"""How long it may take until nobody holds a dead engine any more, before the model is loaded again nevertheless."""


class Service:
    """One model behind the server.

    `load` is called in a thread of its own, so that the server answers meanwhile. `name` is what the model is called,
    by default what it calls itself; then `alias` is accepted too. `loaded` is called on the event loop when loading has
    ended, with the model or with what went wrong. Where the engine dies the model is loaded again, `restarts` times
    within `RESTARTS_S`; after that `ended` is called on the event loop with the reason, and no request is served.
    """

    def __init__(
        self,
        load: Callable[[], AsyncLLM],
        *,
        name: str | None = None,
        alias: str | None = None,
        loaded: Callable[[AsyncLLM | Exception], None] | None = None,
        restarts: int = 0,
        ended: Callable[[EngineDeadError], None] | None = None,
    ) -> None:
        self._load = load
        self._name = name
        self._alias = alias
        self._loaded = loaded
        self._most_restarts = restarts
        self._ended = ended
        self._restarted: deque[float] = deque()
        self._llm: AsyncLLM | None = None
        self._failure: Exception | None = None
        self._stopping = False
        self._watching: asyncio.TimerHandle | None = None
        self._began = time.monotonic()
        self.failures = self.restarts = 0
        """Times that the engine died, and that the model was loaded again."""
        self.created = int(time.time())

    def start(self) -> None:
        """Begin to load; from the running event loop."""
        self._begin_loading()

    def drain(self) -> None:
        """Take nothing new from now on. From any thread, and from signal handlers."""
        self._stopping = True

    def close(self) -> None:
        """Stop the model, if there is one. What still runs ends as aborted."""
        self._stopping = True
        if self._watching is not None:
            self._watching.cancel()
        if self._llm is not None:
            self._llm.close()
        event(_log, logging.INFO, "stopped", {"after_s": round(time.monotonic() - self._began, 1)})

    def model(self) -> AsyncLLM:
        """The model, ready to answer; Problem 503 while there is none."""
        if self._stopping:
            raise stopping()
        if self._failure is not None:
            raise unavailable(f"the model could not be loaded: {self._failure}", "load_failed", retry=False)
        if self._llm is None and self._restarted:
            raise unavailable("the engine failed and the model is being loaded again", "engine_restarting", retry=True)
        if self._llm is None:
            raise unavailable("the model is still loading", "model_loading", retry=True)
        if self._llm.dead is not None:
            raise unavailable(f"the engine has stopped: {self._llm.dead}", "engine_dead", retry=False)
        return self._llm

    @property
    def now(self) -> EngineNow:
        """What metrics tell of it."""
        llm = self._llm
        return EngineNow(
            model="" if llm is None else self.names(llm)[0],
            stats=None if llm is None else llm.stats(),
            ready=llm is not None and not self._stopping and llm.dead is None,
            failures=self.failures,
            restarts=self.restarts,
        )

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

    def _begin_loading(self, *dead: AsyncLLM) -> None:
        """In a thread; it closes a `dead` model first."""
        loop = asyncio.get_running_loop()
        event(_log, logging.INFO, "loading", {})
        # no daemon: Python would end one that comes back from native code by unwinding it, which C++ takes for a
        # failure, and the process would abort; so it waits for this one, and `app.ending_in_time` bounds that
        threading.Thread(target=self._load_and_tell, args=(loop, [*dead]), name="headrace-load").start()

    def _load_and_tell(self, loop: asyncio.AbstractEventLoop, dead: list[AsyncLLM]) -> None:
        outcome: AsyncLLM | Exception
        try:
            if dead:
                _give_back(dead)
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
            self._watch()
            event(_log, logging.INFO, "ready", {"model": self.names(outcome)[0], "context": outcome.model.context})
        if self._loaded is not None:
            self._loaded(outcome)

    def _watch(self) -> None:
        """Look again and again whether the engine lives."""
        self._watching = None
        llm = self._llm
        if llm is None or self._stopping:
            return
        if (reason := llm.dead) is not None:
            self._fail(llm, reason)
        else:
            self._watching = asyncio.get_running_loop().call_later(WATCH_S, self._watch)

    def _fail(self, llm: AsyncLLM, reason: str) -> None:
        """The engine died. Its requests have been told by itself."""
        self.failures += 1
        now = time.monotonic()
        while self._restarted and self._restarted[0] < now - RESTARTS_S:
            self._restarted.popleft()
        again = len(self._restarted) < self._most_restarts
        then = "restart" if again else "end"
        event(_log, logging.ERROR, "engine_failed", {"reason": reason, "then": then})
        if again:
            self._restarted.append(now)
            self.restarts += 1
            self._llm = None
            self._begin_loading(llm)
        elif self._ended is not None:
            self._ended(EngineDeadError(f"the engine has stopped: {reason}"))


def _give_back(dead: list[AsyncLLM]) -> None:
    """Close the model in the list and wait until its memory is free: requests that it failed are still being told, and
    what hangs together in cycles was frozen (`app`)."""
    dead[0].close()
    found = weakref.ref(dead.pop())
    until = time.monotonic() + GONE_S
    gc.unfreeze()
    while found() is not None and time.monotonic() < until:
        gc.collect()
        time.sleep(0.02)
    gc.collect()  # the engine's error knows the engine
