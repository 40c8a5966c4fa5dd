"""Requests for a vector in the plans: what their rows want, what they read from the cache, and after a preemption."""

from __future__ import annotations

import pytest
from toy import Rig

from headrace.execute.plan import Want

PROMPT = tuple(n * n % 11 for n in range(40))
POOLINGS = pytest.mark.parametrize("pooling", ["mean", "last"])


def embed(rig: Rig, prompt: tuple[int, ...] = PROMPT, pooling: str = "mean") -> int:
    return rig.submit(prompt, pooling=pooling, max_tokens=0)


@POOLINGS
def test_only_the_last_row_wants_the_vector(pooling: str) -> None:
    rig = Rig(budget=16)
    user = embed(rig, pooling=pooling)
    rig.run()
    assert [(len(row.tokens), row.want) for plan in rig.plans for row in plan.rows] == [
        (16, Want.NOTHING),
        (16, Want.NOTHING),
        (8, Want.HIDDEN),
    ]
    got = rig.got[user, 0]
    assert got == rig.naive(PROMPT, pooling=pooling, max_tokens=0)
    assert (got.finish, got.tokens, len(got.embedding)) == ("length", [], 1)
    assert rig.timings[user, 0].first_token_s == 0


def test_the_last_reads_what_is_cached_and_the_mean_does_not() -> None:
    rig = Rig(budget=64)
    users = [(embed(rig, pooling="mean"), "mean")]
    rig.run()
    for pooling, computed in (("mean", 40), ("last", 1), ("mean", 40)):
        at = len(rig.plans)
        users.append((embed(rig, pooling=pooling), pooling))
        rig.run()
        assert sum(len(row.tokens) for plan in rig.plans[at:] for row in plan.rows) == computed, pooling
    for user, pooling in users:
        assert rig.got[user, 0] == rig.naive(PROMPT, pooling=pooling, max_tokens=0)


@POOLINGS
def test_after_a_preemption_it_begins_anew(pooling: str) -> None:
    rig = Rig(count=14, budget=2, context=60)
    first = rig.submit((1, 2, 3), max_tokens=40, temperature=1, seed=3)
    rig.step()
    user = embed(rig, pooling=pooling)
    rig.run()
    assert rig.timings[user, 0].preemptions > 0
    assert rig.got[user, 0] == rig.naive(PROMPT, pooling=pooling, max_tokens=0)
    assert rig.got[first, 0] == rig.naive((1, 2, 3), max_tokens=40, temperature=1, seed=3)


def test_an_aborted_one_leaves_nothing() -> None:
    rig = Rig(budget=8)
    user = embed(rig)
    rig.step()
    rig.abort(user)
    rig.run()
    assert (rig.got[user, 0].finish, rig.got[user, 0].embedding) == ("abort", ())


def test_it_may_be_as_long_as_the_context() -> None:
    rig = Rig(context=40)
    user = embed(rig)
    rig.run()
    assert rig.got[user, 0].finish == "length"
    too_long = embed(rig, (*PROMPT, 1))
    assert rig.got[too_long, 0].finish == "error"
