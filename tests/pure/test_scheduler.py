"""The scheduler, rule by rule, on the exact toy executor: cases K1, K5, K6, K7, P1, V2, T5 and D1."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from toy import POISON, VOCAB, Answer, Rig, naive

from headrace.cache import radix
from headrace.execute.plan import Plan, Result, Row, RowResult, Want
from headrace.params import SamplingParams
from headrace.scheduler.request import Request


def tokens(plan: Plan | None) -> list[tuple[int, int, int]]:
    """(request, start, how many) of each row."""
    assert plan is not None
    return [(r.request, r.start, len(r.tokens)) for r in plan.rows]


def computed(rig: Rig) -> int:
    """Tokens computed so far."""
    return sum(len(r.tokens) for p in rig.plans for r in p.rows)


def first_row(rig: Rig, request: int) -> Row:
    return next(r for p in rig.plans for r in p.rows if r.request == request)


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(i * 7 + i // 3 + salt) % VOCAB for i in range(length)]


# Turns


def test_answers_keep_their_pace_beside_long_prompts() -> None:
    rig = Rig(budget=10)
    rig.submit(prompt(3, 1), max_tokens=12)
    rig.submit(prompt(4, 2), max_tokens=12)
    assert tokens(rig.step()) == [(0, 0, 3), (1, 0, 4)]
    rig.submit(prompt(30, 3), max_tokens=2)
    rig.submit(prompt(5, 4), max_tokens=2)
    assert tokens(rig.step()) == [(0, 3, 1), (1, 4, 1), (2, 0, 8)]
    assert tokens(rig.step()) == [(0, 4, 1), (1, 5, 1), (2, 8, 8)]
    assert tokens(rig.step()) == [(0, 5, 1), (1, 6, 1), (2, 16, 8)]
    assert tokens(rig.step()) == [(0, 6, 1), (1, 7, 1), (2, 24, 6), (3, 0, 2)]
    assert tokens(rig.step()) == [(0, 7, 1), (1, 8, 1), (2, 30, 1), (3, 2, 3)]


class LastFirst:
    """Newcomers overtake: a stand-in, to have a long row that goes before answers."""

    def rank(self, request: Request) -> tuple[int, ...]:
        return (-request.order, request.choice)

    def begins(self, request: Request) -> None:
        pass

    ends = begins


def test_answers_keep_their_pace_even_behind_a_long_prompt_that_goes_first() -> None:
    rig = Rig(budget=4, turns=LastFirst())
    rig.submit(prompt(3), max_tokens=12)
    rig.step()
    rig.submit(prompt(12), max_tokens=2)
    for start in (3, 4, 5, 6):
        plan = rig.step()
        assert tokens(plan)[0] == (0, start, 1)


def test_who_finds_no_block_keeps_what_it_has() -> None:
    """The latest stands still where nobody later can make room: it is not preempted for its own sake."""
    rig = Rig(count=5, block=4, budget=64)
    older = rig.submit(prompt(8), max_tokens=5)
    later = rig.submit(prompt(7, 1), max_tokens=8)
    assert [tokens(rig.step()) for _ in range(4)][1:] == [[(0, 8, 1), (1, 7, 1)], [(0, 9, 1)], [(0, 10, 1)]]
    assert [r.user for r in rig.scheduler.running] == [older, later]
    rig.run()
    assert rig.scheduler.stats().preemptions == 0
    assert rig.got[older, 0] == rig.naive(prompt(8), max_tokens=5)
    assert rig.got[later, 0] == rig.naive(prompt(7, 1), max_tokens=8)


def test_rows_and_wants_of_chunks() -> None:
    rig = Rig(budget=4)
    rig.submit(prompt(9), max_tokens=2, prompt_logprobs=0)
    rig.run()
    assert [r.want for p in rig.plans for r in p.rows] == [Want.PROMPT, Want.PROMPT, Want.BOTH, Want.TOKEN]
    rig = Rig(budget=4)
    rig.submit(prompt(9), max_tokens=2)
    rig.run()
    assert [r.want for p in rig.plans for r in p.rows] == [Want.NOTHING, Want.NOTHING, Want.TOKEN, Want.TOKEN]


def test_no_more_rows_than_asked_for() -> None:
    rig = Rig(rows=3)
    users = [rig.submit(prompt(2, i), max_tokens=5) for i in range(7)]
    while rig.step():
        assert len(rig.scheduler.running) <= 3
    assert max(len(p.rows) for p in rig.plans) == 3
    assert [rig.got[u, 0] for u in users] == [rig.naive(prompt(2, i), max_tokens=5) for i, u in enumerate(users)]


@pytest.mark.parametrize("others", [3, 10])
def test_a_short_newcomer_waits_only_for_what_stood_before_it(others: int) -> None:
    """K7: long prompts keep coming and take the whole budget; the newcomer's turn comes all the same."""
    rig = Rig(count=4000, budget=64, rows=64, context=2000)
    for i in range(others):
        rig.submit(prompt(400, i), max_tokens=1)
    short = rig.submit(prompt(5), max_tokens=3)
    before = others * 400
    for step in range(1, 1000):
        rig.submit(prompt(400, step), max_tokens=1)
        rig.step()
        if rig.got.get((short, 0), Answer()).tokens:
            break
    assert step <= -(-(before + 5) // 64) + 1


@pytest.mark.parametrize("budget", [2, 8])
def test_a_long_prompt_gets_through_endless_short_ones(budget: int) -> None:
    """K7, the other way round."""
    rig = Rig(count=500, budget=budget, rows=8, context=400)
    for i in range(8):
        rig.submit(prompt(2, i), max_tokens=9)
    long = rig.submit(prompt(300), max_tokens=1)
    for step in range(2000):
        rig.submit(prompt(2, step), max_tokens=9)
        rig.step()
        if (long, 0) in rig.got:
            break
    assert rig.got[long, 0] == rig.naive(prompt(300), max_tokens=1)
    assert step < 2 * 300 / budget + 50


# The pool


@pytest.mark.parametrize("windows", [(None,), (None, None), (None, 6), (6,)])
@pytest.mark.parametrize("budget", [1, 5, 64])
def test_prompts_around_the_size_of_the_pool(windows: tuple[int | None, ...], budget: int) -> None:
    """K1: one block less than usable, usable, one more."""
    rig = Rig(count=8 * len(windows), block=4, windows=windows, budget=budget, context=60)
    usable = min(rig.blocks.most_tokens, 59)
    for length in (usable - 4, usable - 1, usable):
        user = rig.submit(prompt(length))
        rig.run()
        assert rig.got[user, 0] == rig.naive(prompt(length))
        assert rig.got[user, 0].finish == "length"
        assert len(rig.got[user, 0].tokens) == min(60, rig.blocks.most_tokens + 1) - length
    too_long = rig.submit(prompt(usable + 1))
    beyond = rig.submit(prompt(usable + 4))
    small = rig.submit(prompt(3), max_tokens=2)
    rig.run()
    for user in (too_long, beyond):
        assert rig.got[user, 0].finish == "error"
        assert str(usable) in (rig.got[user, 0].error or "")
    assert rig.got[small, 0] == rig.naive(prompt(3), max_tokens=2)
    assert rig.scheduler.stats().preemptions == 0


@pytest.mark.parametrize("overflow", ["sliding", "sinks"])
def test_windows_that_nothing_fits_into_are_an_error(overflow: str) -> None:
    small = Rig(count=3, block=4, context=60)
    none = Rig(count=20, block=4, context=60)
    for rig, tokens in ((small, prompt(5)), (none, [])):
        user = rig.submit(tokens, overflow=overflow)
        served = rig.submit(prompt(3), max_tokens=2)
        rig.run()
        assert rig.got[user, 0].finish == "error"
        assert rig.got[served, 0] == rig.naive(prompt(3), max_tokens=2)


def test_an_answer_that_outgrows_the_pool_ends_and_preempts_nobody() -> None:
    rig = Rig(count=10, block=4, budget=64, context=500)
    user = rig.submit(prompt(24), max_tokens=300)
    rig.run(most=40)
    assert (rig.got[user, 0].finish, len(rig.got[user, 0].tokens)) == ("length", 40 + 1 - 24)
    assert rig.scheduler.stats().preemptions == 0


def test_blocks_are_taken_only_when_needed() -> None:
    rig = Rig(count=100, block=4, budget=8)
    rig.submit(prompt(20), max_tokens=6)
    used = []
    while rig.step() is not None:
        used.append(rig.blocks.used)
    assert used[:8] == [2, 4, 5, 6, 6, 6, 6, 0]


def test_the_latest_is_preempted_and_resumes_first_with_all_its_tokens() -> None:
    rig = Rig(count=9, block=4, budget=64)
    users = [rig.submit(prompt(8, i), max_tokens=20) for i in range(3)]
    while not rig.scheduler.stats().preemptions:
        rig.step()
    before = rig.plans[-1]
    assert before.released == (2,)
    assert [r.user for r in rig.scheduler.running] == [0, 1]
    late = rig.submit(prompt(8, 9), max_tokens=1)
    assert [r.user for r in rig.scheduler.waiting] == [2, late]
    so_far = rig.got[2, 0].tokens[:]
    assert so_far
    rig.run()
    again = next(a for p in rig.plans[len(rig.plans) // 4 :] for a in p.admitted if a.request == 2)
    assert list(again.tokens[:8]) == prompt(8, 2)
    assert list(again.tokens[8:]) == rig.got[2, 0].tokens[: len(again.tokens) - 8]
    assert len(again.tokens) - 8 >= len(so_far)
    assert again.prompt == 8
    assert [a.request for p in rig.plans for a in p.admitted].index(3) > 3
    for i, user in enumerate(users):
        assert rig.got[user, 0] == rig.naive(prompt(8, i), max_tokens=20)


class LongestFirst:
    """Long prompts overtake: a stand-in, to have a long row that takes from answers."""

    def rank(self, request: Request) -> tuple[int, ...]:
        return (-request.prompt, request.order, request.choice)

    def begins(self, request: Request) -> None:
        pass

    ends = begins


def test_a_preempted_row_leaves_the_plan_it_was_in() -> None:
    """One's single token is planned first, then the chunk of another that goes before it takes its blocks and its
    budget."""
    rig = Rig(count=7, block=4, budget=2, turns=LongestFirst())
    short = rig.submit(prompt(3), max_tokens=20)
    rig.step()
    rig.step()
    long = rig.submit(prompt(14, 1), max_tokens=2)
    plan = rig.step()
    assert tokens(plan) == [(0, 3, 1), (1, 0, 1)]
    while plan is not None and not plan.released:
        plan = rig.step()
    assert plan is not None
    assert plan.released == (0,)
    assert tokens(plan) == [(1, 12, 2)]
    rig.run()
    assert rig.got[long, 0] == rig.naive(prompt(14, 1), max_tokens=2)
    assert rig.got[short, 0] == rig.naive(prompt(3), max_tokens=20)


@pytest.mark.parametrize("chunk", [3, 8, 16, 17, 64])
@pytest.mark.parametrize("block", [1, 4])
def test_windows_around_their_size(chunk: int, block: int) -> None:
    """K5: prompts of window - 2 to window + 2 and twice that, in chunks of every kind."""
    window = 16
    rig = Rig(count=400, block=block, windows=(window, None, window), budget=chunk, context=90)
    lengths = [*range(window - 2, window + 3), *range(2 * window - 2, 2 * window + 3)]
    for length in lengths:
        user = rig.submit(prompt(length, length), max_tokens=20)
        rig.run()
        assert rig.got[user, 0] == rig.naive(prompt(length, length), max_tokens=20)


def test_windowed_layers_give_blocks_back_while_the_request_lives() -> None:
    rig = Rig(count=60, block=4, windows=(8,), budget=8, context=300)
    rig.submit(prompt(100), max_tokens=100)
    most = 0
    while rig.step() is not None:
        most = max(most, rig.blocks.used)
    assert most <= 3


@pytest.mark.parametrize(("count", "admitted"), [(8, True), (7, False)])
def test_newcomers_leave_a_block_of_each_group_to_whoever_runs(count: int, admitted: bool) -> None:
    """Two groups: the first holds two blocks and will want two more, the other needs four."""
    rig = Rig(count=count, block=4, windows=(None, 8), budget=64)
    rig.submit(prompt(3), max_tokens=4)
    rig.step()
    assert rig.blocks.used == 2
    rig.submit(prompt(5), max_tokens=2)
    rig.step()
    assert len(rig.scheduler.running) == 1 + admitted
    rig.run()


# Siblings


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9, 16, 17])
@pytest.mark.parametrize("windows", [(None,), (3, None), (4,), (5, 16)])
@pytest.mark.parametrize("budget", [1, 3, 64])
def test_siblings_share_the_prompts_full_blocks(length: int, windows: tuple[int | None, ...], budget: int) -> None:
    rig = Rig(count=100, block=4, windows=windows, budget=budget)
    want = {"n": 3, "temperature": 1, "seed": 5, "max_tokens": 6}
    user = rig.submit(prompt(length), **want)
    rig.run()
    for choice in range(3):
        assert rig.got[user, choice] == rig.naive(prompt(length), choice, **want)
    assert len({tuple(rig.got[user, c].tokens) for c in range(3)}) == 3
    shared = (length - 1) // 4
    for choice in (1, 2):
        row = next(r for p in rig.plans for r in p.rows if r.request == choice)
        assert row.shared == shared
        assert row.start == shared * 4 or (row.copied and row.start > shared * 4)
    assert rig.scheduler.stats().tokens_in == length


def test_sharing_saves_blocks() -> None:
    rig = Rig(count=100, block=4, budget=64)
    rig.submit(prompt(41), n=5, max_tokens=3, temperature=1)
    rig.step()
    rig.step()
    assert rig.blocks.used == 10 + 5


@pytest.mark.parametrize("length", [8, 9])
def test_siblings_share_though_the_first_is_done_at_once(length: int) -> None:
    rig = Rig(block=4, budget=64)
    user = rig.submit(prompt(length), n=3, max_tokens=1, temperature=1)
    rig.run()
    assert computed(rig) == length + 2, "all but the last token could be had"
    for c in range(3):
        assert rig.got[user, c] == rig.naive(prompt(length), c, n=3, max_tokens=1, temperature=1)


def test_more_siblings_than_rows() -> None:
    rig = Rig(count=40, rows=2, budget=8)
    want: dict[str, Any] = {"n": 9, "temperature": 1, "max_tokens": 4}
    user = rig.submit(prompt(10), **want)
    other = rig.submit(prompt(3), max_tokens=3)
    most = 0
    while rig.step() is not None:
        most = max(most, len(rig.scheduler.running))
    assert most == 2
    assert max(len(plan.rows) for plan in rig.plans) == 2
    for c in range(9):
        assert rig.got[user, c] == rig.naive(prompt(10), c, **want)
    assert rig.got[other, 0] == rig.naive(prompt(3), max_tokens=3)


def test_siblings_outlive_an_error_of_the_first() -> None:
    rig = Rig(budget=4)
    user = rig.submit(prompt(9), n=3, temperature=1, max_tokens=4)
    plan = rig.scheduler.plan()
    assert plan is not None
    rig.toy.run(plan)
    rig.collect(rig.scheduler.commit(plan, Result((RowResult(error="broken"),))))
    rig.scheduler.check()
    rig.run()
    assert (rig.got[user, 0].finish, rig.got[user, 0].error) == ("error", "broken")
    for c in (1, 2):
        assert rig.got[user, c] == rig.naive(prompt(9), c, n=3, temperature=1, max_tokens=4)


# The prefix cache


def test_a_second_request_computes_only_what_is_new() -> None:
    rig = Rig(block=4)
    first = rig.submit(prompt(14), max_tokens=1)
    rig.run()
    second = rig.submit(prompt(14), max_tokens=3)
    longer = rig.submit([*prompt(10), 5, 5, 5, 5], max_tokens=3)
    rig.run()
    for user, ids, most in ((first, prompt(14), 1), (second, prompt(14), 3), (longer, [*prompt(10), 5, 5, 5, 5], 3)):
        assert rig.got[user, 0] == rig.naive(ids, max_tokens=most)
    rows = [first_row(rig, request) for request in range(3)]
    assert [(r.start, len(r.tokens), r.shared, bool(r.copied)) for r in rows] == [
        (0, 14, 0, False),
        (13, 1, 3, True),
        (10, 4, 2, True),
    ]
    assert [rig.timings[user, 0].cached for user in (first, second, longer)] == [0, 13, 10]
    stats = rig.scheduler.stats()
    assert (stats.prefix_asked, stats.prefix_hits, stats.tokens_in) == (42, 23, 42)


@pytest.mark.parametrize("windows", [(None,), (None, 5)])
@pytest.mark.parametrize("answer", [7, 8, 9])
def test_the_next_turn_begins_where_the_answer_ended(answer: int, windows: tuple[int | None, ...]) -> None:
    """The answer's last token was never computed; all before it is there, the block it ends in too."""
    rig = Rig(block=4, windows=windows)
    first = rig.submit(prompt(9), max_tokens=answer)
    rig.run()
    talk = [*prompt(9), *rig.got[first, 0].tokens, 1, 2, 3]
    second = rig.submit(talk, max_tokens=4)
    rig.run()
    assert rig.got[second, 0] == rig.naive(talk, max_tokens=4)
    row = first_row(rig, 1)
    assert (row.start, row.shared) == (8 + answer, (8 + answer) // 4)
    assert len(row.copied) == (len(windows) if (8 + answer) % 4 else 0)
    assert rig.timings[second, 0].cached == 8 + answer


def watch_who_waits(rig: Rig) -> None:
    """A step. Who could have a row and has none waits for a block that another row of the plan makes whole."""
    s, block = rig.scheduler, rig.scheduler.blocks.block
    plan = s.plan()
    if plan is None:
        assert not s.running
        return
    assert plan.rows or not s.running
    rows = [(row.start, row.start + len(row.tokens), s._by_id[row.request]) for row in plan.rows]
    for r in s.running:
        if r.id in s._rows or not s._left or len(s._rows) >= s.rows or not rig.blocks.room(r.id, r.computed):
            continue
        end = r.computed + block
        assert r.computed % block == 0
        assert any(a < end <= b and o.root == r.root and o.tokens[:end] == r.tokens[:end] for a, b, o in rows)
    rig.plans.append(plan)
    rig.collect(s.commit(plan, rig.toy.run(plan)))
    s.check()


@pytest.mark.parametrize("windows", [(None,), (6, None)])
@pytest.mark.parametrize("budget", [3, 8, 50, 1000])
@pytest.mark.parametrize("count", [2, 16])
@pytest.mark.parametrize("prefix", [40, 42])
def test_what_arrives_together_is_computed_once(
    count: int, budget: int, prefix: int, windows: tuple[int | None, ...]
) -> None:
    rig = Rig(count=400, block=4, budget=budget, rows=16, windows=windows)
    prompts = [[*prompt(prefix), i % VOCAB, i // VOCAB, i, 1, 1] for i in range(count)]
    users = [rig.submit([t % VOCAB for t in ids], max_tokens=1) for ids in prompts]
    while rig.scheduler.running or rig.scheduler.waiting:
        watch_who_waits(rig)
    for user, ids in zip(users, prompts, strict=True):
        assert rig.got[user, 0] == rig.naive([t % VOCAB for t in ids], max_tokens=1)
    ends = len(prompts[0]) - prefix // 4 * 4
    assert computed(rig) <= prefix // 4 * 4 + count * ends, "something was computed twice"
    copied = sum(row.start % 4 for p in rig.plans for row in p.rows if row.copied)
    assert computed(rig) == prefix // 4 * 4 + count * ends - copied
    assert rig.scheduler.stats().prefix_hits == (count - 1) * (prefix // 4 * 4) + copied


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 9, 64])
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("count", [9, 12, 30])
def test_nobody_waits_for_a_row_that_does_not_come(budget: int, rows: int, count: int) -> None:
    """Budget, rows and blocks run out; requests come that share, in any order, and one that goes before them."""
    for turns in (None, LastFirst(), LongestFirst()):
        rig = Rig(count=count, block=4, budget=budget, rows=rows, turns=turns)
        want = []
        for step in range(12):
            ids = [*prompt(8 + step % 3 * 4), *[step % VOCAB] * (step % 5)][: 4 * count - 8]
            if step % 2 == 0:
                most = 1 + step % 4 * 3
                want.append((rig.submit(ids, max_tokens=most), ids, most))
            watch_who_waits(rig)
        while rig.scheduler.running or rig.scheduler.waiting:
            watch_who_waits(rig)
        for user, ids, most in want:
            assert rig.got[user, 0] == rig.naive(ids, max_tokens=most)


@pytest.mark.parametrize("how", ["error", "abort", "preempted"])
def test_who_waits_goes_on_when_the_other_is_gone(how: str) -> None:
    rig = Rig(block=4, budget=64)
    first, second = (rig.submit([*prompt(30), last], max_tokens=2) for last in (1, 2))
    plan = rig.scheduler.plan()
    assert tokens(plan) == [(0, 0, 31)]
    assert plan is not None
    assert [r.id for r in rig.scheduler.running] == [0, 1]
    result = rig.toy.run(plan)
    rig.collect(rig.scheduler.commit(plan, Result((RowResult(error="broken"),)) if how == "error" else result))
    if how == "abort":
        rig.abort(first)
    if how == "preempted":
        rig.scheduler._preempt(rig.scheduler.running[0])
    start = 0 if how == "error" else 30
    plan = rig.step()
    assert plan is not None
    assert next(row.start for row in plan.rows if row.request == 1) == start
    rig.run()
    assert rig.got[second, 0] == rig.naive([*prompt(30), 2], max_tokens=2)
    assert rig.timings[second, 0].cached == start


def test_salts_keep_apart() -> None:
    rig = Rig(block=4, budget=64)
    users = [rig.submit(prompt(14), salt=salt, max_tokens=3) for salt in ("", "a", "b")]
    assert tokens(rig.step()) == [(0, 0, 14), (1, 0, 14), (2, 0, 14)]
    rig.run()
    stats = rig.scheduler.stats()
    assert (stats.prefix_asked, stats.prefix_hits) == (42, 0)
    users.append(rig.submit(prompt(14), salt="b", max_tokens=3))
    rig.run()
    assert rig.scheduler.stats().prefix_hits == 13
    for user in users:
        assert rig.got[user, 0] == rig.naive(prompt(14), max_tokens=3)


def test_who_wants_the_prompts_logprobs_reads_nothing_but_is_read() -> None:
    rig = Rig(block=4, budget=64)
    asks: dict[str, Any] = {"max_tokens": 2, "prompt_logprobs": 0}
    scored = rig.submit(prompt(14), **asks)
    plain = rig.submit(prompt(14), max_tokens=2)
    assert tokens(rig.step()) == [(0, 0, 14)], "the other waits for it"
    rig.run()
    again = rig.submit(prompt(14), **asks)
    rig.run()
    for user, params in ((scored, asks), (plain, {"max_tokens": 2}), (again, asks)):
        assert rig.got[user, 0] == rig.naive(prompt(14), **params)
    assert [(r.start, r.shared, r.copied) for r in (first_row(rig, 0), first_row(rig, 2))] == [(0, 0, ())] * 2
    assert (first_row(rig, 1).start, first_row(rig, 1).shared) == (12, 3)
    assert [rig.timings[u, 0].cached for u in (scored, plain, again)] == [0, 12, 0]


def test_a_preempted_request_goes_on_from_the_cache() -> None:
    rig = Rig(block=4, budget=64)
    user = rig.submit(prompt(9), max_tokens=9)
    for _ in range(6):
        rig.step()
    assert rig.scheduler.running[0].computed == 14
    rig.scheduler._preempt(rig.scheduler.running[0])
    plan = rig.step()
    assert tokens(plan) == [(0, 14, 1)]
    assert plan is not None
    assert (plan.rows[0].shared, len(plan.rows[0].copied)) == (3, 1)
    rig.run()
    assert rig.got[user, 0] == rig.naive(prompt(9), max_tokens=9)
    assert (rig.timings[user, 0].preemptions, rig.timings[user, 0].cached) == (1, 0)
    assert rig.scheduler.stats().prefix_hits == 0


def test_no_hit_counts_twice_or_without_a_row() -> None:
    """One finds two blocks and waits for the next ones, but is preempted; another is aborted before its first row."""
    rig = Rig(block=4, budget=64)
    rig.submit(prompt(8), max_tokens=1)
    rig.run()
    rig.submit(prompt(24), max_tokens=1)
    waits = rig.submit(prompt(24), max_tokens=1)
    gone = rig.submit(prompt(24), max_tokens=1)
    assert tokens(rig.step()) == [(1, 8, 16)]
    assert [(r.computed, r.started) for r in rig.scheduler.running] == [(8, None), (8, None)]
    rig.scheduler._preempt(rig.scheduler.running[0])
    rig.abort(gone)
    rig.run()
    assert rig.timings[waits, 0].cached == first_row(rig, 2).start == 23
    stats = rig.scheduler.stats()
    assert (stats.prefix_asked, stats.prefix_hits) == (8 + 24 + 24, 8 + 23)


def test_priorities_stay_longer() -> None:
    rig = Rig(count=9, block=4, budget=64)
    for salt, priority in ((1, 5), (2, 0), (3, 0)):
        rig.submit(prompt(12, salt), max_tokens=1, priority=priority)
        rig.run()
    assert rig.scheduler.stats().blocks_idle == 9
    rig.submit(prompt(12, 4), max_tokens=1)
    rig.run()
    hits = []
    for salt in (1, 3, 2):
        user = rig.submit(prompt(12, salt), max_tokens=1)
        rig.run()
        hits.append(rig.timings[user, 0].cached > 0)
    assert hits == [True, True, False]


def test_what_an_urgent_request_uses_stays_longer_too() -> None:
    rig = Rig(count=6, block=4, budget=64)
    for salt, priority in ((1, 0), (2, 0), (1, 5), (2, 0)):
        rig.submit(prompt(9, salt), max_tokens=1, priority=priority)
        rig.run()
    rig.submit(prompt(8, 3), max_tokens=1)
    rig.run()
    user = rig.submit(prompt(9, 1), max_tokens=1)
    rig.run()
    assert rig.timings[user, 0].cached == 8


def test_a_pool_full_of_idle_blocks_admits_as_if_it_were_empty() -> None:
    rig = Rig(count=12, block=4, budget=64)
    for salt in range(6):
        rig.submit(prompt(8, salt), max_tokens=1)
        rig.run()
    assert rig.scheduler.stats().blocks_idle == rig.scheduler.stats().blocks_total == 12
    users = [rig.submit(prompt(11, salt), max_tokens=2) for salt in (7, 8, 9)]
    assert tokens(rig.step()) == [(6, 0, 11), (7, 0, 11), (8, 0, 11)]
    rig.run()
    for user, salt in zip(users, (7, 8, 9), strict=True):
        assert rig.got[user, 0] == rig.naive(prompt(11, salt), max_tokens=2)
    assert rig.scheduler.stats().preemptions == 0


def test_a_shared_prefix_that_is_held_needs_no_room() -> None:
    """Seven blocks, five of them held by the first: only with those the second fits."""
    rig = Rig(count=8, block=4, budget=64)
    rig.submit(prompt(21), max_tokens=3)
    rig.step()
    rig.submit([*prompt(20), 1], max_tokens=2)
    rig.submit(prompt(21, 5), max_tokens=2)
    rig.step()
    assert [r.id for r in rig.scheduler.running] == [0, 1]
    rig.run()
    assert rig.scheduler.stats().preemptions == 0


@pytest.mark.parametrize("seed", [0, POISON])
def test_nobody_copies_from_a_request_that_broke(seed: int) -> None:
    """Its logits were finite twice; what the last row left in its last block nobody knows."""
    rig = Rig(block=8)
    broken = rig.submit(prompt(9), max_tokens=5, seed=seed)
    rig.run()
    assert rig.got[broken, 0].finish == ("error" if seed else "length")
    ids = [*prompt(9), *rig.got[broken, 0].tokens[:2], 1]
    user = rig.submit(ids, max_tokens=3)
    rig.run()
    row = first_row(rig, 1)
    assert (row.start, row.shared, bool(row.copied)) == ((8, 1, False) if seed else (11, 1, True))
    assert rig.got[user, 0] == rig.naive(ids, max_tokens=3)


def test_nobody_copies_what_never_proved_finite() -> None:
    rig = Rig(block=8, budget=8)
    gone = rig.submit(prompt(20), max_tokens=5)
    rig.step()
    rig.abort(gone)
    user = rig.submit([*prompt(5), 1, 1], max_tokens=1)
    rig.step()
    assert (first_row(rig, 1).start, first_row(rig, 1).copied) == (0, ())
    whole = rig.submit(prompt(9), max_tokens=2)
    rig.run()
    assert (first_row(rig, 2).start, first_row(rig, 2).shared) == (8, 1)
    last = rig.submit([*prompt(6), 1], max_tokens=1)
    rig.run()
    assert (first_row(rig, 3).start, bool(first_row(rig, 3).copied)) == (6, True), "now it has"
    for u, ids, most in ((user, [*prompt(5), 1, 1], 1), (whole, prompt(9), 2), (last, [*prompt(6), 1], 1)):
        assert rig.got[u, 0] == rig.naive(ids, max_tokens=most)


def test_without_reuse_only_the_choices_of_one_request_share() -> None:
    rig = Rig(block=4, budget=64, reuse=False)
    want: dict[str, Any] = {"n": 3, "temperature": 1, "max_tokens": 3}
    user, twin = rig.submit(prompt(14), **want), rig.submit(prompt(14), **want)
    assert tokens(rig.step()) == [(0, 0, 14), (3, 0, 14)]
    assert tokens(rig.step())[2:] == [(1, 12, 2), (2, 12, 2), (4, 12, 2), (5, 12, 2)]
    rig.run()
    stats = rig.scheduler.stats()
    assert (stats.blocks_idle, len(rig.scheduler.prefix)) == (0, 0)
    assert (stats.prefix_asked, stats.prefix_hits) == (6 * 14, 4 * 12)
    later = rig.submit(prompt(14), max_tokens=1)
    rig.run()
    assert first_row(rig, 6).start == 0
    assert rig.got[later, 0] == rig.naive(prompt(14), max_tokens=1)
    for c in range(3):
        assert rig.got[user, c] == rig.got[twin, c] == rig.naive(prompt(14), c, **want)


def test_windows_are_given_back_at_once_and_reused_where_all_is_there() -> None:
    rig = Rig(count=32, block=4, windows=(None, 8), budget=8)
    first = rig.submit(prompt(40), max_tokens=1)
    while rig.step() is not None:
        running = rig.scheduler.stats().running
        assert rig.blocks.used <= running * (10 + 3), "the window's blocks are held too long"
    assert rig.scheduler.stats().blocks_idle == 20
    other = rig.submit(prompt(31, 1), max_tokens=1)  # takes sixteen: what is spare, and the oldest of the window's
    rig.run()
    short = rig.submit([*prompt(4), 5], max_tokens=1)  # and this four more of those
    rig.run()
    assert rig.timings[short, 0].cached == 0, "what it reads of the window is gone"
    long = rig.submit([*prompt(40), 5], max_tokens=1)
    rig.run()
    assert rig.timings[long, 0].cached == 40
    assert first_row(rig, 3).blocks[1][:8] == (-1,) * 8
    ends = {first: prompt(40), other: prompt(31, 1), short: [*prompt(4), 5], long: [*prompt(40), 5]}
    for user, ids in ends.items():
        assert rig.got[user, 0] == rig.naive(ids, max_tokens=1)


@pytest.mark.parametrize("windows", [(None,), (None, 6), (3, 7)])
@pytest.mark.parametrize("budget", [3, 16])
def test_places_are_counted_once_for_each_block(budget: int, windows: tuple[int | None, ...]) -> None:
    rig = Rig(count=200, block=4, windows=windows, budget=budget)
    for length, last in ((21, 1), (21, 2), (6, 3), (23, 4)):
        rig.submit([*prompt(length), last], n=1 + last % 2, temperature=1, max_tokens=4)
    places = filled = 0
    while (plan := rig.scheduler.plan()) is not None:
        ends = {r.id: r.computed for r in rig.scheduler.running}
        ends |= {row.request: row.start + len(row.tokens) for row in plan.rows}
        holds: dict[int, int] = {}
        for request, end in ends.items():
            for ids in rig.blocks.table(request):
                for i, b in enumerate(ids):
                    if b >= 0:
                        holds[b] = max(holds.get(b, 0), min(4, end - i * 4))
        places += 4 * len(holds)
        filled += sum(holds.values())
        rig.collect(rig.scheduler.commit(plan, rig.toy.run(plan)))
        stats = rig.scheduler.stats()
        assert (stats.places, stats.places_filled) == (places, filled)
    assert 0 < filled < places


def test_keys_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the steps and the preemptions: one for each whole block, and one for the last block at an end."""
    made: list[int] = []
    key = radix._key

    def counted(parent: bytes, ids: Sequence[int]) -> bytes:
        made.append(len(ids))
        return key(parent, ids)

    monkeypatch.setattr(radix, "_key", counted)
    rig = Rig(count=500, block=4, budget=32, rows=16, context=300)
    for salt in range(8):
        rig.submit(prompt(120, salt), max_tokens=9)
    while (plan := rig.scheduler.plan()) is not None:
        rig.collect(rig.scheduler.commit(plan, rig.toy.run(plan)))
    assert made.count(4) == 8 * (128 // 4)
    assert len(made) == 8 * (128 // 4)


def test_what_is_pinned_is_no_room_for_anybody() -> None:
    rig = Rig(count=10, block=4, budget=64)
    first = rig.submit(prompt(17), max_tokens=1)
    rig.run()
    keys: list[bytes] = []
    prefix = rig.scheduler.prefix
    prefix.extend(keys, prefix.root(""), prompt(16))
    assert prefix.pin(keys) == 4
    assert rig.blocks.used == 4
    long = rig.submit(prompt(20, 1))
    too_long = rig.submit(prompt(25, 1))
    while rig.step() is not None:
        pass
    assert (rig.got[long, 0].finish, len(rig.got[long, 0].tokens)) == ("length", 6 * 4 + 1 - 20)
    assert rig.got[too_long, 0].finish == "error"
    again = rig.submit(prompt(17), max_tokens=1)
    while rig.step() is not None:
        pass
    assert rig.timings[again, 0].cached == 16
    assert rig.got[again, 0] == rig.got[first, 0]


# The same answer whoever is beside it


SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 42, "max_tokens": 16, "ignore_eos": True, "frequency_penalty": 1}


def answer_beside(others: list[dict[str, Any]], position: int = 0, **rig_options: Any) -> tuple[Answer, Rig]:
    rig = Rig(eos=frozenset({2}), **rig_options)
    for i, other in enumerate(others[:position]):
        rig.submit(prompt(6, i + 1), **other)
    user = rig.submit(prompt(6), **SEEDED)
    for i, other in enumerate(others[position:]):
        rig.submit(prompt(6, i + 50), **other)
    rig.run()
    return rig.got[user, 0], rig


def test_a_seeded_request_is_the_same_in_any_company() -> None:
    """P1 and V2: alone, beside unseeded and seeded ones, beside masked ids, in positions 1 to 8, across preemptions."""
    alone, rig = answer_beside([])
    assert alone == rig.naive(prompt(6), **SEEDED)
    assert len(alone.tokens) == 16
    unseeded = {"temperature": 1, "max_tokens": 20}
    masked = {"stop_token_ids": [VOCAB - 1], "logit_bias": {VOCAB - 1: 5, 0: -100}, "min_tokens": 10, "max_tokens": 20}
    for other in (unseeded, {**SEEDED, "seed": 7}, SEEDED, masked):
        assert answer_beside([other])[0] == alone
    for position in range(8):
        assert answer_beside([unseeded, masked] * 4, position)[0] == alone
    again, rig = answer_beside([{**unseeded, "ignore_eos": True}] * 2, 2, count=12, budget=64)
    assert any(a.request == 2 and len(a.tokens) > 6 for p in rig.plans for a in p.admitted), "it was not preempted"
    assert again == alone


def test_three_choices_of_one_seed() -> None:
    runs = []
    for other in (False, True):
        rig = Rig()
        if other:
            rig.submit(prompt(4, 3), temperature=1, max_tokens=30)
        user = rig.submit(prompt(6), **SEEDED, n=3)
        rig.run()
        runs.append([rig.got[user, c].tokens for c in range(3)])
    assert runs[0] == runs[1]
    assert len({tuple(t) for t in runs[0]}) == 3


# Ends


def test_end_tokens() -> None:
    """T5: every end token of the model ends it, and none with ignore_eos; only stop_token_ids are told."""
    free = Rig().naive(prompt(5), max_tokens=40).tokens
    first = {t: free.index(t) for t in set(free)}
    a, b = sorted(first, key=first.__getitem__)[2:4]
    rig = Rig(eos=frozenset({a, b}))
    plain = rig.submit(prompt(5), max_tokens=40)
    ignored = rig.submit(prompt(5), max_tokens=40, ignore_eos=True)
    told = rig.submit(prompt(5), max_tokens=40, ignore_eos=True, stop_token_ids=[b])
    both = rig.submit(prompt(5), max_tokens=40, stop_token_ids=[a])
    late = rig.submit(prompt(5), max_tokens=40, min_tokens=first[a] + 3)
    rig.run()
    assert rig.got[plain, 0].tokens == free[: first[a] + 1]
    assert (rig.got[plain, 0].finish, rig.got[plain, 0].stop_reason) == ("stop", None)
    assert rig.got[plain, 0].pieces[-1] == ""
    assert rig.got[plain, 0].text == "".join(rig.got[plain, 0].pieces)
    assert rig.got[ignored, 0].tokens == free
    assert rig.got[ignored, 0].finish == "length"
    assert rig.got[told, 0].tokens == free[: first[b] + 1]
    assert (rig.got[told, 0].finish, rig.got[told, 0].stop_reason) == ("stop", b)
    assert rig.got[both, 0].stop_reason is None
    assert not {a, b} & set(rig.got[late, 0].tokens[: first[a] + 3])
    assert len(rig.got[late, 0].tokens) > first[a] + 3


def test_stop_strings() -> None:
    whole = Rig().naive(prompt(5), max_tokens=40).text
    stop = whole[7:10]
    at = whole.index(stop)
    for include in (False, True):
        rig = Rig()
        user = rig.submit(prompt(5), max_tokens=40, stop=stop, include_stop_str_in_output=include)
        rig.run()
        got = rig.got[user, 0]
        assert (got.finish, got.stop_reason, got.text) == ("stop", stop, whole[: at + 3 * include])


def with_drafts(row: Row, drafts: list[int]) -> Row:
    return replace(row, tokens=(*row.tokens, *drafts), drafts=len(drafts))


@pytest.mark.parametrize("offset", range(6))
@pytest.mark.parametrize("cap", range(1, 8))
@pytest.mark.parametrize("by", ["eos", "id", "string", "nothing"])
def test_a_stop_within_a_run_of_accepted_drafts(offset: int, cap: int, by: str) -> None:
    """D1: text, reason and count equal those without drafts, wherever stop and cap fall."""
    free = naive(prompt(5), SamplingParams(temperature=0, max_tokens=7), 0, (None,), frozenset(), 100).tokens
    stop = {"id": {"stop_token_ids": [free[offset]]}, "string": {"stop": ["ab", "ca", "d"][offset % 3]}}.get(by, {})
    params: dict[str, Any] = {"max_tokens": cap, **stop}
    rig = Rig(block=16, eos=frozenset({free[offset]}) if by == "eos" else frozenset())
    user = rig.submit(prompt(5), **params)
    plan = rig.scheduler.plan()
    assert plan is not None
    plan = replace(plan, rows=(with_drafts(plan.rows[0], free[:6]),))
    rig.collect(rig.scheduler.commit(plan, rig.toy.run(plan)))
    rig.scheduler.check()
    assert rig.got[user, 0] == rig.naive(prompt(5), **params)
    assert rig.got[user, 0].finish is not None
    rig.run()


@pytest.mark.parametrize("wrong", range(5))
def test_drafts_are_kept_up_to_the_first_wrong_one(wrong: int) -> None:
    rig = Rig(block=16)
    user = rig.submit(prompt(5), max_tokens=20)
    want = rig.naive(prompt(5), max_tokens=20).tokens
    drafts = want[:4]
    if wrong < 4:
        drafts[wrong] = (drafts[wrong] + 1) % VOCAB
    plan = rig.scheduler.plan()
    assert plan is not None
    plan = replace(plan, rows=(with_drafts(plan.rows[0], drafts),))
    rig.collect(rig.scheduler.commit(plan, rig.toy.run(plan)))
    assert rig.got[user, 0].tokens == want[: wrong + 1]
    assert rig.scheduler.running[0].computed == 5 + wrong
    stats = rig.scheduler.stats()
    assert (stats.places, stats.places_filled) == (16, 5), "a draft is not yet a token"
    rig.run()
    assert rig.got[user, 0].tokens == want


def test_a_broken_row_ends_its_request_alone() -> None:
    rig = Rig()
    good = rig.submit(prompt(5), max_tokens=9)
    bad = rig.submit(prompt(5, 1), max_tokens=9, seed=POISON)
    rig.run()
    assert rig.got[good, 0] == rig.naive(prompt(5), max_tokens=9)
    assert (rig.got[bad, 0].finish, rig.got[bad, 0].error) == ("error", "the logits are not finite")
    assert len(rig.got[bad, 0].tokens) == 2


def test_what_an_executor_must_give_is_held_to() -> None:
    rig = Rig()
    rig.submit(prompt(5), prompt_logprobs=0)
    plan = rig.scheduler.plan()
    assert plan is not None
    for wrong in (RowResult(), RowResult(tokens=(1, 2)), RowResult(tokens=(1,))):
        with pytest.raises(ValueError, match="gave"):
            rig.scheduler.commit(plan, Result((wrong,)))
    with pytest.raises(ValueError, match="zip"):
        rig.scheduler.commit(plan, Result(()))


# Log-probabilities


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("length", [1, 8, 13])
def test_only_the_prompt(n: int, length: int) -> None:
    rig = Rig(budget=5)
    params: dict[str, Any] = {"max_tokens": 0, "prompt_logprobs": 0, "n": n}
    user = rig.submit(prompt(length), **params)
    rig.run()
    assert computed(rig) == length + (n - 1) * (length - (length - 1) // 4 * 4)
    for c in range(n):
        assert rig.got[user, c] == rig.naive(prompt(length), c, **params)
        assert len(rig.got[user, c].prompt_logprobs) == (0 if c else length)
        assert (rig.got[user, c].finish, rig.got[user, c].tokens) == ("length", [])


def test_only_the_prompt_may_fill_the_whole_pool() -> None:
    rig = Rig(count=5, block=4, context=100)
    user = rig.submit(prompt(20), max_tokens=0, prompt_logprobs=0)
    more = rig.submit(prompt(21), max_tokens=0, prompt_logprobs=0)
    rig.run()
    assert len(rig.got[user, 0].prompt_logprobs) == 20
    assert rig.got[more, 0].finish == "error"


@pytest.mark.parametrize("steps", range(1, 9))
def test_a_preemption_reports_no_logprob_twice(steps: int) -> None:
    rig = Rig(count=40, block=2, budget=3)
    params: dict[str, Any] = {"max_tokens": 5, "prompt_logprobs": 0, "logprobs": 0, "n": 2}
    user = rig.submit(prompt(14), **params)
    for _ in range(steps):
        rig.step()
    victims = rig.scheduler.running[::-1]
    for victim in victims:
        rig.scheduler._preempt(victim)
    rig.scheduler.check()
    rig.run()
    for c in range(2):
        assert rig.got[user, c] == rig.naive(prompt(14), c, **params)


# Coming and going


@pytest.mark.parametrize("steps", range(12))
@pytest.mark.parametrize("n", [1, 3])
def test_abort_at_every_stage(steps: int, n: int) -> None:
    """K6: queued, reading, answering, some choices done; a plain request afterwards is served."""
    rig = Rig(budget=4, block=2, eos=frozenset({4}), windows=(4, None))
    params: dict[str, Any] = {"n": n, "temperature": 1, "max_tokens": 6, "seed": 3}
    beside = rig.submit(prompt(7, 2), max_tokens=30, ignore_eos=True)
    user = rig.submit(prompt(9), **params)
    for _ in range(steps):
        rig.step()
    done = {c for c in range(n) if rig.got.get((user, c), Answer()).finish}
    rig.abort(user)
    assert {c for u, c in rig.got if u == user and rig.got[u, c].finish} == set(range(n))
    for c in range(n):
        assert (rig.got[user, c].finish == "abort") == (c not in done)
        assert rig.got[user, c].tokens == rig.naive(prompt(9), c, **params).tokens[: len(rig.got[user, c].tokens)]
    assert rig.scheduler.stats().aborts == n - len(done)
    rig.abort(user)
    rig.abort(12345)
    following = rig.step()
    assert following is not None
    assert {r.request for r in following.rows} <= {0}, "it still computes"
    last = rig.submit(prompt(3), max_tokens=2)
    rig.run()
    assert rig.got[last, 0] == rig.naive(prompt(3), max_tokens=2)
    assert rig.got[beside, 0] == rig.naive(prompt(7, 2), max_tokens=30, ignore_eos=True)


def test_an_abort_in_an_idle_engine_still_drops_the_executors_state() -> None:
    rig = Rig()
    user = rig.submit(prompt(5))
    rig.step()
    assert rig.toy.states
    rig.abort(user)
    plan = rig.step()
    assert plan is not None
    assert (plan.rows, plan.released) == ((), (0,))
    assert not rig.toy.states
    assert rig.step() is None


def test_ids_may_come_back_after_their_end_only() -> None:
    rig = Rig()
    rig.submit(prompt(3), max_tokens=2)
    rig.users = 0
    with pytest.raises(ValueError, match="request 0 is already here"):
        rig.submit(prompt(3))
    rig.run()
    rig.got.clear()
    rig.users = 0
    rig.submit(prompt(3), max_tokens=2)
    rig.run()
    assert rig.got[0, 0] == rig.naive(prompt(3), max_tokens=2)


def test_counters() -> None:
    rig = Rig(count=9, block=4, budget=64)
    for i in range(3):
        rig.submit(prompt(8, i), max_tokens=20)
    assert rig.scheduler.stats().waiting == 3
    rig.submit(prompt(8, 5), n=4)
    assert rig.scheduler.stats().waiting == 7
    rig.step()
    assert (rig.scheduler.stats().running, rig.scheduler.stats().blocks_total) == (3, 9)
    rig.abort(3)
    rig.run()
    stats = rig.scheduler.stats()
    assert (stats.tokens_in, stats.tokens_out, stats.aborts) == (24, 60, 4)
    assert stats.steps == sum(bool(plan.rows) for plan in rig.plans)
    assert stats.preemptions == sum(len(p.admitted) for p in rig.plans) - 3 > 0


def test_timings() -> None:
    """From arrival to the first row, the first token and the end; a preemption starts none of them anew."""
    rig = Rig(budget=5)
    user = rig.submit(prompt(9), max_tokens=3)
    waits = rig.submit(prompt(9), max_tokens=3)
    pause = 0.02
    for _ in range(3):  # two chunks of its prompt, its second token
        time.sleep(pause)
        rig.step()
    rig.scheduler._preempt(rig.scheduler.running[0])
    for _ in range(2):
        time.sleep(pause)
        rig.step()
    rig.abort(waits)
    rig.run()
    t = rig.timings[user, 0]
    assert t.queued_s >= pause
    assert t.first_token_s - t.queued_s >= pause
    assert t.total_s - t.first_token_s >= 2 * pause
    assert t.preemptions == 1
    assert rig.timings[waits, 0].preemptions == 0
    never = rig.submit(prompt(3))
    rig.abort(never)
    t = rig.timings[never, 0]
    assert t.queued_s == t.total_s > t.first_token_s == 0


def test_plans_are_increments() -> None:
    """Each block is named once, and each request is introduced before its first row."""
    rig = Rig(budget=6, block=2, windows=(None, 3))
    rig.submit(prompt(11), max_tokens=9)
    rig.run()
    rows = [r for p in rig.plans for r in p.rows]
    assert all(a.start + len(a.tokens) == b.start for a, b in pairwise(rows))
    assert [len(r.blocks[0]) for r in rows[:4]] == [3, 3, 0, 1]
    assert [a.request for a in rig.plans[0].admitted] == [0]
    assert not any(p.admitted for p in rig.plans[1:])


def test_the_toy_sees_foreign_and_stale_blocks() -> None:
    """The test's own eyes: what it must catch, it does."""
    rig = Rig(block=4)
    rig.submit(prompt(9), max_tokens=9)
    rig.step()
    rig.toy.kv[rig.blocks.table(0)[0][1]] = [None] * 4
    with pytest.raises(AssertionError, match="does not hold position"):
        rig.step()
