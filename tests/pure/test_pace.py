"""How much of a prompt a step takes up."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import MOST_MS, Options
from headrace.errors import OptionError
from headrace.scheduler.pace import FEWEST, GRACE_S, KNOWN, LONGEST_S, SLOWER, Pace

WHATEVER = 2**31


def paced(step_s: float | None = None, alone: float = 0.02, each: float = 0.001) -> Pace:
    pace = Pace(step_s)
    pace.took(4, 0, alone)
    pace.took(4, 50, alone + 50 * each)
    return pace


def test_nothing_is_held_back_before_anything_is_known() -> None:
    assert Pace().others(3) == WHATEVER
    assert Pace(0.001).others(3) == WHATEVER
    once = Pace()
    once.took(2, 0, 0.01)
    assert once.others(2) == WHATEVER


def test_beside_answers_a_step_lasts_twice_as_long_and_a_little() -> None:
    assert paced().others(4) == pytest.approx((0.02 + GRACE_S) / 0.001, abs=1)


def test_where_nobody_answers_a_step_still_comes_to_its_end_soon() -> None:
    assert paced().others(0) == pytest.approx((LONGEST_S - 0.02) / 0.001, abs=1)
    assert paced(each=2.0).others(0) == FEWEST


def test_a_model_whose_every_step_is_long_is_not_fed_token_by_token() -> None:
    pace, tokens = Pace(), 512
    pace.took(1, 0, 2.0)
    for _ in range(30):
        pace.took(0, tokens, 2.0 + 0.002 * tokens)
        tokens = min(512, pace.others(0))
    assert tokens == 512
    other = Pace()
    for _ in range(30):
        other.took(0, 512, 2.0)
    assert other.others(0) == WHATEVER, "how long a step without prompts takes is not known yet"


def test_steps_of_many_answers_are_not_measured_by_those_of_one() -> None:
    pace = Pace()
    for _ in range(KNOWN):
        pace.took(1, 0, 0.03)
        pace.took(16, 0, 0.1)
        pace.took(16, 20, 0.1 + 20 * 0.005)
    assert pace.others(16) == pytest.approx((0.1 + GRACE_S) / 0.005, abs=1)
    assert pace.others(20) == pace.others(16)
    assert pace.others(1) == pytest.approx((0.03 + GRACE_S) / 0.005, abs=1)
    assert pace.others(2) == pace.others(1), "the nearest that is known"


def test_a_step_of_so_many_milliseconds() -> None:
    assert paced(0.1).others(0) == pytest.approx(80, abs=1)
    assert paced(0.1).others(4) == pytest.approx(80, abs=1)
    assert paced(0.001).others(4) == FEWEST, "a prompt gets on, however long its tokens take"


def test_what_a_few_steps_were_held_up_by_does_not_count() -> None:
    pace = paced()
    for _ in range(KNOWN):
        pace.took(4, 0, 0.02)
        pace.took(4, 50, 0.07)
    for _ in range(KNOWN // 2):
        pace.took(4, 0, 3.0)
        pace.took(4, 50, 3.0)
    assert pace.others(4) == pytest.approx((0.02 + GRACE_S) / 0.001, abs=1)


def test_it_follows_what_it_sees() -> None:
    pace = paced()
    for _ in range(2 * KNOWN):
        pace.took(4, 0, 0.2)
        pace.took(4, 10, 0.2 + 10 * 0.01)
    assert pace.others(4) == pytest.approx((0.2 + GRACE_S) / 0.01, abs=1)
    assert pace.token_s == pytest.approx(0.01)


@pytest.mark.parametrize("option", [{"step_ms": 1}, {"max_wait_ms": 1, "policy": "dynamic"}])
def test_times_are_bounded_by_what_a_thread_can_wait(option: dict[str, Any]) -> None:
    name = next(iter(option))
    Options.of(**option | {name: MOST_MS})
    assert MOST_MS / 1000 < threading.TIMEOUT_MAX
    for value in (MOST_MS + 1, 10**18, 10**400, 10**5000, 0):
        with pytest.raises(OptionError, match=f"{name} must be "):
            Options.of(**option | {name: value})


@given(
    alone=st.floats(0.001, 1),
    each=st.floats(1e-5, 0.1),
    answers=st.integers(1, 64),
)
def test_the_step_that_is_planned_keeps_to_it(alone: float, each: float, answers: int) -> None:
    others = paced(None, alone, each).others(answers)
    assert others == FEWEST or alone + others * each <= SLOWER * alone + GRACE_S + 1e-6
    assert alone + (others + 2) * each > SLOWER * alone + GRACE_S - 1e-6
