"""What constrains an answer, without a library: thinking before a grammar, masks beside a step, ends."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.constrain.constraint import Constraint, ConstraintError, Words
from headrace.constrain.masks import Asked, Filler
from headrace.constrain.thinking import Thinking
from headrace.params import Reasoning

WIDTH = 70
BEGIN, END, EOS = 40, 41, 42


class Counting:
    """Tokens 0, 1, 2, ... up to `last`, each by itself; it may end after any token that can be divided by `every`."""

    def __init__(self, last: int = 9, every: int = 3) -> None:
        self.last, self.every = last, every
        self.taken: list[int] = []

    @property
    def accepting(self) -> bool:
        return self.right and bool(self.taken) and self.taken[-1] % self.every == 0

    @property
    def done(self) -> bool:
        return self.right and len(self.taken) > self.last

    @property
    def right(self) -> bool:
        return self.taken == list(range(len(self.taken)))

    def fill(self, line: Words) -> None:
        if not self.right:
            raise ConstraintError("counted wrongly")
        line[:] = 0
        if not self.done:
            line[len(self.taken) // 32] = 1 << (len(self.taken) % 32)

    def take(self, token: int) -> None:
        self.taken.append(token)

    def rollback(self, count: int) -> None:
        del self.taken[len(self.taken) - count :]


def allowed(line: Words) -> set[int]:
    return {t for t in range(32 * len(line)) if line[t // 32] >> (t % 32) & 1}


def may(constraint: Constraint) -> set[int]:
    line = np.zeros(-(-WIDTH // 32), np.uint32)
    constraint.fill(line)
    return allowed(line)


EVERYTHING = set(range(96))


def thinking(then: Counting | None = None, **fields: object) -> Thinking:
    return Thinking(Reasoning(BEGIN, END, **fields), then)  # type: ignore[arg-type]


# Thinking


def test_the_grammar_begins_after_the_thinking() -> None:
    counting = Counting(last=3)
    it = thinking(counting, begun=True)
    for token in (5, 0, 1, BEGIN):
        assert may(it) == EVERYTHING and not it.accepting and not it.done
        it.take(token)
    it.take(END)
    for token in range(4):
        assert may(it) == {token} and not it.done
        assert it.accepting == (token in (1,))
        it.take(token)
    assert it.done and counting.taken == [0, 1, 2, 3]


def test_an_answer_may_begin_without_thinking() -> None:
    it = thinking(Counting(last=1))
    assert may(it) == {0, BEGIN}
    it.take(0)
    assert may(it) == {1}
    it.take(1)
    assert it.done


def test_or_begin_one_itself() -> None:
    it = thinking(Counting(last=1))
    it.take(BEGIN)
    assert may(it) == EVERYTHING
    it.take(END)
    assert may(it) == {0}


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_budget_forces_the_end(budget: int) -> None:
    it = thinking(Counting(), begun=True, budget=budget)
    for _ in range(budget):
        assert may(it) == EVERYTHING
        it.take(7)
    assert may(it) == {END}
    it.take(END)
    assert may(it) == {0}


def test_without_a_grammar_only_the_thinking_is_bounded() -> None:
    it = thinking(budget=2)
    assert may(it) == EVERYTHING
    for token in (BEGIN, 1, 2):
        it.take(token)
    assert may(it) == {END} and not it.accepting
    it.take(END)
    assert may(it) == EVERYTHING and it.accepting and not it.done


@given(st.data())
def test_rollback_is_exact(data: st.DataObject) -> None:
    begun = data.draw(st.booleans())
    budget = data.draw(st.none() | st.integers(0, 4))

    def fresh(tokens: Sequence[int]) -> Thinking:
        it = thinking(Counting(last=3), begun=begun, budget=budget)
        for token in tokens:
            it.take(token)
        return it

    tokens = data.draw(st.lists(st.sampled_from([0, 1, 2, 3, BEGIN, END]), max_size=10))
    it = fresh(tokens)
    for _ in range(3):
        count = data.draw(st.integers(0, len(tokens)))
        it.rollback(count)
        tokens = tokens[: len(tokens) - count]
        other = fresh(tokens)
        assert (it.accepting, it.done) == (other.accepting, other.done)
        assert outcome(it) == outcome(other)
        more = data.draw(st.lists(st.sampled_from([0, 1, 2, 3, BEGIN, END]), max_size=4))
        for token in more:
            it.take(token)
        tokens = [*tokens, *more]


def outcome(constraint: Constraint) -> object:
    try:
        return may(constraint)
    except ConstraintError as error:
        return str(error)


# Masks


def masks(*asked: Asked, eos: frozenset[int] = frozenset({EOS})) -> dict[int, tuple[list[set[int]], str | None]]:
    filler = Filler(WIDTH, eos)
    try:
        wait = filler.begin(asked)
        assert wait is not None
        return {i: ([allowed(line) for line in mask.lines], mask.error) for i, mask in wait().items()}
    finally:
        filler.close()


def counted(count: int) -> Counting:
    it = Counting()
    for token in range(count):
        it.take(token)
    return it


def test_nobody_waits_for_nothing() -> None:
    assert Filler(WIDTH, frozenset()).begin([]) is None


def test_ends_are_allowed_where_an_answer_may_end() -> None:
    """Several end tokens are all known: the model's own never stands inside, those of a request end it."""
    got = masks(
        Asked(1, counted(1), frozenset({EOS, 60})),
        Asked(2, counted(2), frozenset({EOS, 60})),
        Asked(3, counted(1), frozenset()),
        Asked(4, counted(2), frozenset({2, 60})),
    )
    assert got == {1: ([{1, EOS, 60}], None), 2: ([{2}], None), 3: ([{1}], None), 4: ([set()], None)}


def test_ends_beyond_the_logits_are_no_concern() -> None:
    far = frozenset({EOS, 10**6})
    got = masks(Asked(1, counted(1), far), Asked(2, counted(2), far), eos=far)
    assert got == {1: ([{1, EOS}], None), 2: ([{2}], None)}


def test_the_models_own_ends_are_no_tokens_of_an_answer() -> None:
    got = masks(
        Asked(1, thinking(begun=True), frozenset()), Asked(2, thinking(Counting(), begun=True), frozenset({EOS}))
    )
    assert got == {1: ([EVERYTHING - {EOS}], None), 2: ([EVERYTHING - {EOS}], None)}


def test_each_draft_has_its_line_and_is_rolled_back() -> None:
    it = counted(1)
    assert masks(Asked(1, it, frozenset({EOS}), (1, 2, 3)))[1] == ([{1, EOS}, {2}, {3}, {4, EOS}], None)
    assert it.taken == [0]


def test_behind_a_wrong_draft_nothing_is_read() -> None:
    it = counted(1)
    lines, error = masks(Asked(1, it, frozenset(), (1, 7, 3)))[1]
    assert lines[:2] == [{1}, {2}] and error is None
    assert it.taken == [0]


def test_who_cannot_go_on_is_told_and_nobody_else() -> None:
    wrong = counted(2)
    wrong.take(9)
    got = masks(Asked(1, wrong, frozenset({EOS})), Asked(2, counted(2), frozenset({EOS})))
    assert got[1][1] == "counted wrongly" and got[2] == ([{2}], None)


def test_masks_are_filled_beside_the_step() -> None:
    """Whoever begins does not wait."""
    import threading

    gate = threading.Event()

    class Slow(Counting):
        def fill(self, line: Words) -> None:
            assert gate.wait(10)
            super().fill(line)

    filler = Filler(WIDTH, frozenset())
    wait = filler.begin([Asked(1, Slow(), frozenset())])
    gate.set()
    assert wait is not None and allowed(wait()[1].lines[0]) == {0}
    filler.close()


def test_many_constraints_at_once_do_not_mix() -> None:
    rng = random.Random(2)
    counts = {request: rng.randrange(9) for request in range(50)}
    got = masks(*(Asked(request, counted(count), frozenset()) for request, count in counts.items()))
    assert {request: lines for request, (lines, _) in got.items()} == {r: [{c}] for r, c in counts.items()}
