"""The engine's thread: every request that was posted ends exactly once, whatever happens. Cases K6 and O5."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from toy import Answer, Letters, Toy, naive

from headrace.cache.blocks import Blocks
from headrace.engine.loop import Engine
from headrace.errors import EngineDeadError, HeadraceError
from headrace.execute.plan import Plan, Result
from headrace.params import SamplingParams
from headrace.scheduler.messages import Abort, Delta, Submit
from headrace.scheduler.policy import Continuous
from headrace.scheduler.scheduler import Scheduler

COUNT = 60
PROMPT = (1, 2, 3, 4, 5, 6, 7)


class Gate(Toy):
    """A toy that runs freely, or step by step, or fails at a step."""

    def __init__(self) -> None:
        super().__init__(COUNT, 4, (None, 8))
        self.steps = 0
        self.fail_at: int | None = None
        self.permits: threading.Semaphore | None = None
        self.entered = threading.Semaphore(0)
        self.closes = 0

    def run(self, plan: Plan, masks: Any = None) -> Result:
        self.entered.release()
        if self.permits is not None:
            assert self.permits.acquire(timeout=20)
        self.steps += 1
        if self.steps == self.fail_at:
            raise MemoryError("no more")
        return super().run(plan, masks)

    def close(self) -> None:
        self.closes += 1
        super().close()


class House:
    """An engine with all that came out of it."""

    def __init__(self, **more: Any) -> None:
        self.gate = Gate()
        self.got: dict[tuple[int, int], Answer] = {}
        self.news = threading.Condition()
        self.batches = 0
        scheduler = Scheduler(
            Blocks(COUNT, (None, 8), 4), budget=8, rows=8, context=100, eos=frozenset({4}), text=Letters, **more
        )
        self.scheduler = scheduler
        self.engine = Engine(self.gate, scheduler, deliver=self.deliver)

    def deliver(self, deltas: list[Delta]) -> None:
        with self.news:
            assert deltas
            self.batches += 1
            for d in deltas:
                self.got.setdefault((d.request, d.choice), Answer()).add(d)
            self.news.notify_all()

    def submit(self, user: int, **params: Any) -> None:
        resolved = SamplingParams(**{"temperature": 1, "seed": user, "max_tokens": 10} | params)
        self.engine.post(Submit(user, PROMPT, resolved, time.monotonic()))

    def until(self, holds: Callable[[], bool]) -> None:
        with self.news:
            assert self.news.wait_for(holds, timeout=20), "it did not come"

    def done(self, user: int, n: int = 1) -> bool:
        return all(self.got.get((user, c), Answer()).finish is not None for c in range(n))

    def tokens(self, user: int) -> list[int]:
        return self.got.get((user, 0), Answer()).tokens

    def want(self, user: int, choice: int = 0, **params: Any) -> Answer:
        resolved = SamplingParams(**{"temperature": 1, "seed": user, "max_tokens": 10} | params)
        return naive(PROMPT, resolved, choice, (None, 8), frozenset({4}), 100)

    def serves(self, user: int = 999) -> None:
        """A plain request afterwards must succeed."""
        self.submit(user)
        self.until(lambda: self.done(user))
        assert self.got[user, 0] == self.want(user)

    def is_empty(self) -> bool:
        stats = self.engine.stats()
        return (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)


@pytest.fixture
def house() -> Iterator[House]:
    house = House()
    yield house
    if house.gate.permits is not None:
        house.gate.permits.release(10_000)
    house.engine.close()


def soon(holds: Callable[[], bool], within_s: float = 10) -> bool:
    end = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


def test_requests_from_many_threads(house: House) -> None:
    users = range(60)
    threads = [
        threading.Thread(target=lambda part: [house.submit(u, n=1 + u % 3) for u in part], args=(users[i::6],))
        for i in range(6)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    house.until(lambda: all(house.done(u, 1 + u % 3) for u in users))
    for u in users:
        for c in range(1 + u % 3):
            assert house.got[u, c] == house.want(u, c, n=1 + u % 3)
    assert soon(house.is_empty)
    assert house.batches <= house.engine.stats().steps


def test_a_thread_that_cannot_be_had_is_asked_for_again(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none_left)
        with pytest.raises(HeadraceError, match="new thread"):
            house.submit(1)
    house.serves()
    assert house.engine.stats().waiting == 0


def test_nothing_runs_before_the_first_message_and_nothing_while_idle(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = threading.active_count()
    assert house.engine.stats().steps == 0
    assert threading.active_count() == before
    house.serves()
    assert threading.active_count() == before + 1
    assert soon(lambda: house.engine._idle)
    assert not house.gate.states
    asked: list[None] = []
    monkeypatch.setattr(house.scheduler, "plan", lambda: asked.append(None))
    cpu = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - cpu < 0.05
    assert not asked


@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize("n", [1, 3])
def test_abort_at_every_stage(house: House, steps: int, n: int) -> None:
    """Queued behind others, reading its prompt, answering, with some choices done: it ends within one step."""
    gate = house.gate
    gate.permits = threading.Semaphore(0)
    house.submit(0, ignore_eos=True)
    house.submit(1, n=n)
    for _ in range(steps):
        assert gate.entered.acquire(timeout=20)
        gate.permits.release()
    assert gate.entered.acquire(timeout=20)  # a step is running
    already = {c for c in range(n) if house.got.get((1, c), Answer()).finish}
    house.engine.post(Abort(1))
    gate.permits.release(2)  # it and the next, and none after that
    house.until(lambda: house.done(1, n))
    for c in range(n):
        assert house.got[1, c].finish in (("abort", "stop", "length") if c not in already else ("stop", "length"))
    gate.permits.release(10_000)
    house.until(lambda: house.done(0))
    assert house.got[0, 0] == house.want(0, ignore_eos=True)
    assert soon(house.is_empty)
    house.serves()


def test_an_abort_overtakes_nothing_and_hurts_nobody(house: House) -> None:
    for user in range(20):
        house.submit(user)
        house.engine.post(Abort(user))
        house.engine.post(Abort(user))
        house.engine.post(Abort(user + 500))
    house.until(lambda: all(house.done(u) for u in range(20)))
    house.serves()


@pytest.mark.parametrize("fail_at", [1, 2, 5])
def test_a_failing_step_ends_everybody_once(house: House, fail_at: int) -> None:
    gate = house.gate
    gate.fail_at, gate.permits = fail_at, threading.Semaphore(fail_at - 1)
    for user in range(12):
        house.submit(user, n=1 + user % 2)
    for _ in range(fail_at):
        assert gate.entered.acquire(timeout=20)
    house.submit(50)  # still in the inbox when it happens
    gate.permits.release()
    house.until(lambda: all(house.done(u, 1 + u % 2) for u in range(12)) and house.done(50))
    assert house.got[50, 0].finish == "error"
    assert "MemoryError" in (house.got[50, 0].error or "")
    assert soon(lambda: gate.closes == 1)
    assert isinstance(house.engine.error, MemoryError)
    with pytest.raises(EngineDeadError, match="no more"):
        house.submit(51)
    house.engine.post(Abort(3))
    house.engine.close()
    assert gate.closes == 1


def test_a_failing_commit_forgets_nobody(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that ended inside the failing call are told, too."""
    commit = house.scheduler.commit

    def fails(plan: Plan, result: Result) -> list[Delta]:
        commit(plan, result)
        raise RuntimeError("after all was done")

    monkeypatch.setattr(house.scheduler, "commit", fails)
    house.submit(0, max_tokens=1)
    house.until(lambda: house.done(0))
    assert house.got[0, 0].finish == "error"


def test_a_failing_submit_forgets_nobody(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = house.gate
    gate.permits = threading.Semaphore(0)
    house.submit(0)
    assert gate.entered.acquire(timeout=20)

    def fails(message: Submit) -> list[Delta]:
        raise RuntimeError(f"not {message.id}")

    monkeypatch.setattr(house.scheduler, "submit", fails)
    for user in (1, 2, 3):
        house.submit(user)
    gate.permits.release(10)
    house.until(lambda: all(house.done(u) for u in range(4)))
    assert {house.got[u, 0].finish for u in range(4)} == {"error"}


def test_a_failing_receiver_stops_the_engine_but_not_the_program() -> None:
    def refuse(deltas: list[Delta]) -> None:
        raise OSError("nobody there")

    gate = Gate()
    engine = Engine(gate, House().scheduler, deliver=refuse)
    engine.post(Submit(0, PROMPT, SamplingParams(temperature=0, seed=0), time.monotonic()))
    assert soon(lambda: gate.closes == 1)
    assert isinstance(engine.error, OSError)
    with pytest.raises(EngineDeadError):
        engine.post(Submit(1, PROMPT, SamplingParams(temperature=0, seed=0), time.monotonic()))
    engine.close()


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_close_while_running(house: House, steps: int) -> None:
    gate = house.gate
    gate.permits = threading.Semaphore(0)
    for user in range(10):
        house.submit(user, n=2)
    for _ in range(steps):
        assert gate.entered.acquire(timeout=20)
        gate.permits.release()
    assert gate.entered.acquire(timeout=20)
    closer = threading.Thread(target=house.engine.close)
    closer.start()
    assert soon(lambda: house.engine._closing)
    with pytest.raises(EngineDeadError, match="closed"):
        house.submit(50)
    gate.permits.release()
    closer.join(timeout=20)
    assert not closer.is_alive()
    assert all(house.done(u, 2) for u in range(10))
    assert "abort" in {a.finish for a in house.got.values()}
    assert (gate.closes, house.engine.error) == (1, None)
    house.engine.close()
    house.engine.post(Abort(1))
    assert gate.closes == 1


def test_stop_does_not_wait(house: House) -> None:
    gate = house.gate
    gate.permits = threading.Semaphore(0)
    house.submit(0)
    assert gate.entered.acquire(timeout=20)
    start = time.monotonic()
    thread = house.engine.stop()
    assert time.monotonic() - start < 1
    assert thread is not None and thread.is_alive()
    assert gate.closes == 0
    gate.permits.release()
    thread.join(20)
    assert (gate.closes, house.got[0, 0].finish) == (1, "abort")
    assert House().engine.stop() is None


def test_close_unused() -> None:
    house = House()
    house.engine.close()
    house.engine.close()
    assert house.gate.closes == 1
    with pytest.raises(EngineDeadError):
        house.submit(0)


def test_close_from_its_own_thread() -> None:
    house = House()
    engine = house.engine
    engine._deliver = lambda deltas: engine.close()
    house.submit(0)
    assert soon(lambda: house.gate.closes == 1)
    assert engine.error is None


def test_a_closed_engine_is_freed() -> None:
    house = House()
    house.serves()
    house.engine.close()
    ghost = weakref.ref(house.engine)
    del house
    gc.collect()
    assert ghost() is None


def test_the_same_id_twice(house: House) -> None:
    house.gate.permits = threading.Semaphore(0)
    house.submit(0)
    with pytest.raises(ValueError, match="request 0 is already running"):
        house.submit(0)
    house.gate.permits.release(10_000)
    house.until(lambda: house.done(0))
    assert house.got[0, 0] == house.want(0)


def test_what_was_only_posted_waits_too(house: House) -> None:
    house.gate.permits = threading.Semaphore(0)
    house.submit(0, n=2)
    assert house.gate.entered.acquire(timeout=20)
    house.submit(1)
    house.submit(2, n=3)
    stats = house.engine.stats()
    assert (stats.running, stats.waiting) == (2, 1 + 3)


def test_500_clients_that_drop(house: House) -> None:
    """K6: while queued, reading, answering, or with one of four choices done; then everything is empty."""
    rng = random.Random(1)
    for user in range(500):
        n = 4 if user % 10 == 0 else 1
        house.submit(user, n=n, max_tokens=rng.randint(1, 12))
        if rng.random() < 0.8:
            house.engine.post(Abort(rng.randint(max(0, user - 8), user)))
        if rng.random() < 0.1:
            time.sleep(0.001)
    for user in range(500):
        house.engine.post(Abort(user))
    assert soon(house.is_empty, 3)
    house.until(lambda: all(house.done(u, 4 if u % 10 == 0 else 1) for u in range(500)))
    assert {a.finish for a in house.got.values()} == {"abort", "stop", "length"}
    house.scheduler.check()
    house.serves()
    assert soon(lambda: not house.gate.states)


class Patient(Continuous):
    """Holds everything back for a moment: a policy that only time moves."""

    retry_s = 0.02

    def __init__(self) -> None:
        self.asked = 0

    def admits(self, waiting: Any, running: Any, now: float) -> Any:
        self.asked += 1
        return waiting if now - waiting[0].arrived > 0.1 else ()


def test_a_policy_that_waits_is_asked_again() -> None:
    policy = Patient()
    house = House(policy=policy)
    start = time.monotonic()
    house.serves()
    assert time.monotonic() - start > 0.1
    assert policy.asked > 2
    house.engine.close()


SCRIPT = """
import os, sys, threading, time
sys.path.insert(0, {folder!r})
from test_loop import House
house = House()
{body}
"""


def script(body: str) -> subprocess.CompletedProcess[str]:
    code = SCRIPT.format(folder=os.path.dirname(__file__), body=body)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_the_interpreter_ends_cleanly_with_a_running_engine() -> None:
    done = script(
        """
house.gate.close = lambda: print("closed")
house.submit(0, max_tokens=90, ignore_eos=True)
house.until(lambda: bool(house.tokens(0)))
"""
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


def test_a_fork_before_the_first_use_and_one_after() -> None:
    done = script(
        """
def child(work):
    pid = os.fork()
    if not pid:
        try:
            work()
            sys.exit(0)
        except BaseException as error:
            print(repr(error), flush=True)
            raise
    assert os.waitpid(pid, 0)[1] == 0
child(house.serves)
house.serves()
from headrace.errors import EngineDeadError, HeadraceError
def refused():
    try:
        house.submit(5)
    except EngineDeadError as error:
        assert 'forked' in str(error)
    else:
        raise AssertionError('not refused')
    house.engine.close()
child(refused)
house.serves(5)
"""
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "SystemExit(0)\n" * 2, "")
