"""Limits of admission: who may still wait, and how soon a refused client should ask again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from toy import Rig

from headrace.config import Options
from headrace.engine.gate import Gate
from headrace.errors import OptionError, OverloadedError
from headrace.scheduler.scheduler import Stats

IDLE = Rig().scheduler.stats()


def stats(waiting: int, tokens: int, rate: float = 0.0, token_rate: float = 0.0) -> Stats:
    return replace(IDLE, waiting=waiting, waiting_tokens=tokens, begin_rate=rate, begin_token_rate=token_rate)


def refusal(gate: Gate, requests: int, tokens: int, now: Stats) -> OverloadedError:
    with pytest.raises(OverloadedError) as caught:
        gate.judge(requests, tokens, now)
    return caught.value


def test_the_limits_are_what_may_wait() -> None:
    gate = Gate(10, 1000)
    gate.judge(1, 1, stats(9, 999))
    gate.judge(5, 500, stats(5, 500))
    assert "queue_requests, 10" in str(refusal(gate, 1, 1, stats(10, 10)))
    assert "queue_tokens, 1000" in str(refusal(gate, 1, 2, stats(1, 999)))
    assert "5 requests wait, and 6 more" in str(refusal(gate, 6, 1, stats(5, 5)))
    assert gate.refused == 8


def test_an_empty_queue_takes_any_one_request() -> None:
    gate = Gate(1, 1)
    gate.judge(2048, 10**6, stats(0, 0))
    refusal(gate, 1, 1, stats(1, 1))


@pytest.mark.parametrize(
    ("waiting", "tokens", "rate", "token_rate", "retry_s"),
    [
        (10, 10, 2.0, 1e9, 1),  # one must go
        (29, 10, 2.0, 1e9, 10),
        (10, 10, 0.3, 1e9, 4),
        (10, 10, 0.001, 1e9, 60),
        (10, 10, 0.0, 0.0, 60),
        (2, 1500, 1e9, 100.0, 6),
        (29, 1500, 2.0, 100.0, 10),
        (29, 9000, 2.0, 1000.0, 10),
        (29, 9000, 2.0, 500.0, 17),
    ],
)
def test_when_to_ask_again(waiting: int, tokens: int, rate: float, token_rate: float, retry_s: int) -> None:
    error = refusal(Gate(10, 1000), 1, 10, stats(waiting, tokens, rate, token_rate))
    assert error.retry_s == retry_s
    assert str(error).endswith(f"try again in {retry_s} s")


@pytest.mark.parametrize(
    ("options", "at", "says"),
    [
        ({"policy": "fifo"}, "policy", "continuous, static, dynamic"),
        ({"batch_size": 8}, "batch_size", "policy is continuous"),
        ({"policy": "static", "batch_size": 0}, "batch_size", "at least 1"),
        ({"policy": "static", "batch_size": 65}, "batch_size", "more than the 64"),
        ({"policy": "static", "max_wait_ms": 100}, "max_wait_ms", "policy is static"),
        ({"max_wait_ms": 100}, "max_wait_ms", "policy is continuous"),
        ({"policy": "dynamic", "max_wait_ms": 0}, "max_wait_ms", "at least 1"),
        ({"queue_requests": 0}, "queue_requests", "at least 1"),
        ({"queue_tokens": True}, "queue_tokens", "at least 1"),
        ({"policy": "static", "batch_size": 9, "queue_requests": 8}, "queue_requests", "full with 9"),
        ({"policy": "dynamic", "queue_requests": 63}, "queue_requests", "full with 64"),
    ],
)
def test_options_that_cannot_hold(options: dict[str, object], at: str, says: str) -> None:
    with pytest.raises(OptionError, match=says) as caught:
        Options.of(**options)
    assert caught.value.option == at


def test_a_batch_is_as_large_as_a_step_unless_told() -> None:
    assert Options.of(policy="static", rows=5).scheduler.batch == 5
    assert Options.of(policy="dynamic", batch_size=3, max_wait_ms=7).scheduler.batch == 3
