"""The engine: one thread that plans, runs and commits, reached by messages. Owns the thread, the inbox, and the duty to
end every request that was posted exactly once; knows neither arrays nor text, and installs no signal handlers.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from headrace.constrain.masks import Filler
from headrace.errors import EngineDeadError, HeadraceError
from headrace.execute.plan import Executor
from headrace.scheduler.messages import Delta, Message, Submit
from headrace.scheduler.scheduler import Scheduler, Stats

_log = logging.getLogger(__name__)


class Engine:
    """Runs `scheduler` and `executor` in a thread that starts with the first message, so a fork before that is safe.

    `deliver` gets the deltas of one step in one list, on that thread; it must not block. An unexpected failure ends
    every request with finish="error" and sets `error`. The engine closes the executor, and then its thread calls
    `ended`; an engine that nothing was posted to has no thread, and ends without.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        *,
        deliver: Callable[[list[Delta]], None],
        masks: Filler | None = None,
        ended: Callable[[], None] | None = None,
    ) -> None:
        self.error: BaseException | None = None
        self._executor = executor
        self._scheduler = scheduler
        self._deliver = deliver
        self._masks = masks
        self._ended = ended
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._inbox: list[Message] = []
        self._posted = self._posted_tokens = 0
        """Choices that the scheduler has not heard of yet, and tokens of their prompts."""
        self._owed: dict[int, set[int]] = {}
        self._closing = False
        self._idle = True

    def post(self, message: Message) -> None:
        """Hand a message over; from any thread. EngineDeadError where nobody would serve a Submit any more."""
        with self._wake:
            if isinstance(message, Submit):
                self._must_live()
                if message.id in self._owed:
                    raise ValueError(f"request {message.id} is already running")
                if self._thread is None:
                    self._start()
                self._owed[message.id] = set(range(message.params.n))
                self._posted += message.params.n
                self._posted_tokens += len(message.prompt)
            elif message.id not in self._owed:
                return
            self._inbox.append(message)
            self._wake.notify()

    def close(self) -> None:
        """Stop after the running step, and wait for that; what is unfinished ends with finish="abort". May be called
        again."""
        thread = self.stop()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def stop(self) -> threading.Thread | None:
        """`close` without waiting, as finalizers need it: the thread that still comes to its end, if there is one."""
        with self._wake:
            first, self._closing = not self._closing, True
            thread = self._thread
            self._wake.notify()
        if thread is None and first:
            self._executor.close()
        return thread

    def failure(self) -> BaseException | None:
        """Why the engine stopped; None while it lives. A thread that ended without a word is noticed here. From any
        thread."""
        with self._wake:
            gone = self._thread is not None and not self._thread.is_alive() and not self._closing
        if gone and self.error is None:
            self._die(RuntimeError("its thread has ended"))
        return self.error

    def stats(self) -> Stats:
        """From any thread."""
        with self._wake:
            stats = self._scheduler.stats()
            return replace(
                stats,
                waiting=stats.waiting + self._posted,
                waiting_tokens=stats.waiting_tokens + self._posted_tokens,
            )

    def _start(self) -> None:
        """HeadraceError where the system has no thread to give; the next Submit tries again."""
        thread = threading.Thread(target=self._serve, name="headrace-engine", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise HeadraceError(f"the system has no thread to give for the engine: {error}") from error
        self._thread = thread
        _started.add(self)

    def _must_live(self) -> None:
        if self.error is not None:
            raise EngineDeadError(f"the engine stopped on a failure: {self.error!r}")
        if self._closing:
            raise EngineDeadError("the engine is closed")

    def _serve(self) -> None:
        try:
            while (messages := self._next_messages()) is not None:
                self._step(messages)
            self._settle("abort", "the engine was closed")
            if (plan := self._scheduler.parting()) is not None:
                self._executor.run(plan)
        except BaseException as error:
            self._die(error)
        finally:
            with _logged("closing the executor failed"):
                self._executor.close()
            if self._masks is not None:
                self._masks.close()
            if self._ended is not None:
                with _logged("what was to follow the engine's end failed"):
                    self._ended()

    def _step(self, messages: list[Message]) -> None:
        scheduler = self._scheduler
        deltas: list[Delta] = []
        for message in messages:
            if isinstance(message, Submit):
                deltas += self._take(message)
            else:
                deltas += scheduler.abort(message.id)
        plan = scheduler.plan()
        if plan is not None:
            masks = None if self._masks is None else self._masks.begin(scheduler.constrained(plan))
            result = self._executor.run(plan, masks)
            deltas += scheduler.commit(plan, result)
        self._idle = plan is None
        if deltas:
            self._deliver(deltas)
            self._tick_off(deltas)

    def _take(self, message: Submit) -> list[Delta]:
        with self._wake:  # so that `stats` counts it once
            self._posted -= message.params.n
            self._posted_tokens -= len(message.prompt)
            return self._scheduler.submit(message)

    def _next_messages(self) -> list[Message] | None:
        """What was posted since the last step; sleeps while there is nothing to do. None: stop."""
        with self._wake:
            while self._idle and not self._inbox and not self._closing:
                if not self._wake.wait(self._scheduler.retry_s):
                    break
            if self._closing:
                return None
            inbox, self._inbox = self._inbox, []
            return inbox

    def _tick_off(self, deltas: list[Delta]) -> None:
        with self._wake:
            for delta in deltas:
                if delta.finish is not None:
                    choices = self._owed[delta.request]
                    choices.remove(delta.choice)
                    if not choices:
                        del self._owed[delta.request]

    def _settle(self, finish: str, error: str) -> None:
        """End whoever still waits, wherever the failure left them."""
        with self._wake:
            owed, self._owed, self._inbox = self._owed, {}, []
            self._posted = self._posted_tokens = 0
        if deltas := [Delta(r, c, finish=finish, error=error) for r, choices in owed.items() for c in sorted(choices)]:
            self._deliver(deltas)

    def _die(self, error: BaseException) -> None:
        _log.error("the engine stopped on an unexpected failure", exc_info=error)
        with self._wake:
            self.error = error
        with _logged("telling the requests failed"):
            self._settle("error", f"the engine failed: {error!r}")

    def forked(self) -> None:
        """In the child of a fork: the thread stayed with the parent, and so did whoever held the lock."""
        self._wake = threading.Condition()
        self.error = EngineDeadError("the process was forked after the engine's first use")
        with _logged("telling the requests failed"):
            self._settle("error", f"the engine failed: {self.error}")


def weakly(method: Callable[[list[Delta]], None]) -> Callable[[list[Delta]], None]:
    """The same without keeping its object alive: the engine's thread must not hold a model that nobody uses."""
    found = weakref.WeakMethod(method)

    def deliver(deltas: list[Delta]) -> None:
        if (alive := found()) is not None:
            alive(deltas)

    return deliver


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """On the way down nothing may keep the rest from being told."""
    try:
        yield
    except Exception:
        _log.exception(what)


_started: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread inside native code must not outlive the interpreter."""
    for engine in list(_started):
        engine.close()


def _after_fork() -> None:
    for engine in list(_started):
        engine.forked()


os.register_at_fork(after_in_child=_after_fork)
