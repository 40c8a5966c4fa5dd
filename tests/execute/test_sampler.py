"""The order of the sampling steps and what sampling remembers, against a twin that loops over a dense row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.execute.plan import Admission, TokenLogprob
from headrace.execute.sampler import NOT_FINITE, NOTHING_LEFT, Answer, Draw, SamplingState, Score, reduce
from headrace.ops import sampling
from headrace.params import SamplingParams
from tests.execute.resolved import OFF

VOCAB = 24
BIG = float(np.finfo(np.float32).max)


def admission(tokens: tuple[int, ...], prompt: int, eos: tuple[int, ...] = (), **params: Any) -> Admission:
    return Admission(0, 0, SamplingParams(**(OFF | params)), tokens, prompt, frozenset(eos))


def state(
    tokens: tuple[int, ...] = (1, 2, 3), prompt: int = 3, eos: tuple[int, ...] = (), **params: Any
) -> SamplingState:
    return SamplingState(admission(tokens, prompt, eos, **params), VOCAB)


def one(line: np.ndarray, ask: Draw | Score) -> Answer:
    return reduce(line[None].copy(), [ask])[0]


def normal(seed: int, scale: float = 2.0, vocab: int = VOCAB) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * scale).astype(np.float32)


# -- the twin ----------------------------------------------------------------------------------------------------------


def processed(row: np.ndarray, a: Admission) -> list[np.float32]:
    """Steps 2 to 4, token by token."""
    f, p = np.float32, a.params
    prompt, answer = a.tokens[: a.prompt], a.tokens[a.prompt :]
    out = []
    for token, logit in enumerate(row):
        x = f(logit)
        if token in p.logit_bias:
            x = x + f(p.logit_bias[token])
        if len(answer) < p.min_tokens and token in a.eos:
            x = f(-np.inf)
        if x != -np.inf:
            if token in prompt + answer:
                x = x / f(p.repetition_penalty) if x > 0 else x * f(p.repetition_penalty)
            if token in answer:
                x = x - f(p.frequency_penalty) * f(answer.count(token))
                x = x - f(p.presence_penalty)
        out.append(x)
    return out


def expected(row: np.ndarray, a: Admission) -> Answer:
    """The whole definition, log-probabilities by float64 softmax."""
    p, index = a.params, len(a.tokens) - a.prompt
    line = np.array(processed(row, a), np.float32)
    peak = float(line.max())
    greedy = p.temperature < 1e-5
    if greedy:
        token = min(range(len(line)), key=lambda i: (-line[i], i))
    else:
        number = sampling.numbers(p.seed, a.choice, sampling.DRAW, index, 1)[0]
        token = sampling.choose(line, peak, p.temperature, top_k=p.top_k, top_p=p.top_p, min_p=p.min_p, number=number)
    if p.logprobs is None:
        return Answer(token)
    raw = p.logprobs_mode == "raw"
    return Answer(token, score(row if raw else line, token, p.logprobs, 1 if raw or greedy else p.temperature))


def score(line: np.ndarray, token: int, k: int, temperature: float = 1) -> TokenLogprob:
    with np.errstate(divide="ignore"):
        x = line.astype(np.float64) / temperature
        x -= x.max() + np.log(np.exp(x - x.max()).sum())
    ranked = sorted(range(len(line)), key=lambda i: (-line[i], i))
    return TokenLogprob(token, float(x[token]), ranked.index(token) + 1, tuple((i, float(x[i])) for i in ranked[:k]))


def same(got: Answer, want: Answer) -> None:
    assert (got.token, got.error, got.logprob is None) == (want.token, want.error, want.logprob is None)
    if got.logprob and want.logprob:
        close(got.logprob, want.logprob)


def close(got: TokenLogprob, want: TokenLogprob) -> None:
    assert (got.token, got.rank, [t for t, _ in got.top]) == (want.token, want.rank, [t for t, _ in want.top])
    logprobs = [got.logprob, *(x for _, x in got.top)], [want.logprob, *(x for _, x in want.top)]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=2e-6, rel=1e-6)


token_ids = st.integers(0, VOCAB - 1)
histories = st.tuples(st.lists(token_ids, min_size=1, max_size=8), st.lists(token_ids, max_size=8))
all_params = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-6, 0.5, 1.0, 3.0]),
        "top_k": st.sampled_from([-1, 0, 1, 5, 100]),
        "top_p": st.sampled_from([1.0, 0.9, 0.4]),
        "min_p": st.sampled_from([0.0, 0.1, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.5]),
        "presence_penalty": st.sampled_from([0.0, 1.1, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.7, -1.0]),
        "logit_bias": st.dictionaries(token_ids, st.sampled_from([-100.0, 2.5]), max_size=3),
        "min_tokens": st.integers(0, 6),
        "logprobs": st.sampled_from([None, 0, 4, 30]),
        "logprobs_mode": st.sampled_from(["raw", "processed"]),
        "seed": st.sampled_from([0, 42, -1, 2**63 - 1]),
    }
)
some_eos = st.lists(token_ids, max_size=3).map(tuple)
lines = st.tuples(st.integers(0, 10**6), st.sampled_from(["normal", "ties", "banned"])).map(
    lambda key: {
        "normal": normal(key[0]),
        "ties": np.round(normal(key[0])),
        "banned": np.where(normal(key[0] + 1) < 1, normal(key[0]), -np.inf).astype(np.float32),
    }[key[1]]
)


@given(lines, histories, some_eos, all_params)
@settings(max_examples=400, deadline=None)
def test_every_step_in_its_order(
    row: np.ndarray, history: tuple[list[int], list[int]], eos: tuple[int, ...], params: dict[str, Any]
) -> None:
    a = admission(tuple(history[0] + history[1]), len(history[0]), eos, **params)
    if np.isneginf(processed(row, a)).all():
        assert one(row, Draw(SamplingState(a, VOCAB))) == Answer(error=NOTHING_LEFT)
    else:
        same(one(row, Draw(SamplingState(a, VOCAB))), expected(row, a))


# -- what sampling remembers -------------------------------------------------------------------------------------------


@given(
    histories,
    st.lists(st.tuples(st.lists(token_ids, max_size=4), st.integers(0, 4), token_ids), max_size=6),
    all_params,
)
@settings(max_examples=200, deadline=None)
def test_a_state_kept_along_equals_one_built_anew(
    history: tuple[list[int], list[int]], steps: list[tuple[list[int], int, int]], params: dict[str, Any]
) -> None:
    """Decode steps with drafts, of which some are accepted: at each step, after each draft, the answer is that of a
    request admitted with just these tokens. So a preemption changes nothing, and rejected drafts leave no trace.
    """
    prompt, known = len(history[0]), history[0] + history[1]
    eos = (3, 4)
    kept = state(tuple(known), prompt, eos, **params)
    kept.advance(0, tuple(known), ())
    start, row = len(known) - 1, normal(len(known))
    for drafts, accepted, token in steps:
        kept.advance(start, tuple(known[start:]), tuple(drafts))
        for ahead in range(len(drafts) + 1):
            anew = state(tuple(known + drafts[:ahead]), prompt, eos, **params)
            assert one(row, Draw(kept, ahead)) == one(row, Draw(anew))
        fresh = state(tuple(known), prompt, eos, **params)
        assert kept.length == fresh.length
        if kept.penalties and fresh.penalties:
            assert kept.penalties.counts() == fresh.penalties.counts()
        known += [*drafts[:accepted], token]
        start = len(known) - 1


def test_a_gap_in_the_tokens_is_refused() -> None:
    kept = state()
    kept.advance(2, (3,), (5, 6))
    with pytest.raises(ValueError, match="starts at 6, but only 5 tokens are known"):
        kept.advance(6, (1,), ())


def test_tokens_told_twice_count_once() -> None:
    kept = state((1, 2, 3, 9), 3, frequency_penalty=1.0)
    for _ in range(2):
        kept.advance(0, (1, 2, 3, 9), ())
    kept.advance(3, (9, 9), ())
    assert kept.penalties is not None
    assert kept.penalties.counts() == {1: 0, 2: 0, 3: 0, 9: 2}


def test_many_new_tokens() -> None:
    answer = tuple(range(3, 303))
    kept = SamplingState(admission((0, 1, 2, *answer), 3, presence_penalty=1.0), 400)
    got = reduce(np.zeros((1, 400), np.float32), [Draw(kept)])[0]
    assert got.token == 0
    line = np.zeros(400, np.float32)
    kept.touch(line, 0)
    assert line.tolist() == [0.0] * 3 + [-1.0] * 300 + [0.0] * 97


def test_params_must_be_resolved() -> None:
    a = Admission(0, 0, SamplingParams(temperature=1, top_p=1, top_k=0, min_p=0, seed=1), (1,), 1, frozenset())
    with pytest.raises(ValueError, match="repetition_penalty is None"):
        SamplingState(a, VOCAB)


# -- a line's answer depends on that line (P1) -------------------------------------------------------------------------


def test_p1_neighbours_and_position_never_matter() -> None:
    row = normal(1)
    alone = [one(row, Draw(state((1, 2, 3, *[5] * i), 3, temperature=0.8, seed=42))).token for i in range(16)]
    assert len(set(alone)) > 3
    others = [
        Draw(state(temperature=1.0, seed=1)),
        Draw(state(temperature=1.0, seed=42)),
        Draw(state()),
        Draw(state(temperature=0.7, top_k=3, logprobs=2, repetition_penalty=1.5)),
        Score(3, 2),
        Draw(state(eos=(1,), min_tokens=3)),
        Draw(state(temperature=0.2, top_p=0.4, min_p=0.1)),
    ]
    for place in range(8):
        for i, token in enumerate(alone):
            a = Draw(state((1, 2, 3, *[5] * i), 3, temperature=0.8, seed=42))
            batch = np.stack([normal(9 + n) for n in range(place)] + [row] + [normal(20 + n) for n in range(7 - place)])
            assert reduce(batch, [*others[:place], a, *others[place:]])[place].token == token


def test_p1_choices_of_one_seed_differ_and_repeat() -> None:
    def run(choice: int) -> list[int | None]:
        found = []
        for index in range(12):
            a = admission((1, *[2] * index), 1, temperature=3.0, seed=42)
            a = Admission(0, choice, a.params, a.tokens, a.prompt, a.eos)
            found.append(one(normal(3), Draw(SamplingState(a, VOCAB))).token)
        return found

    choices = [run(c) for c in range(3)]
    assert len({tuple(c) for c in choices}) == 3
    assert choices == [run(c) for c in range(3)]


def test_p1_a_long_answer_takes_the_numbers_of_its_places() -> None:
    kept = state(temperature=1.0, seed=-5)
    expected = sampling.numbers(-5, 0, sampling.DRAW, 0, 200)
    assert [kept.number(index) for index in range(200)] == expected
    assert [kept.number(index) for index in (130, 3, 64, 63)] == [expected[i] for i in (130, 3, 64, 63)]


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_p1_every_seed_is_honoured(seed: int) -> None:
    def run(seed: int) -> list[int | None]:
        kept = [state((1, *[2] * i), 1, temperature=1.0, seed=seed) for i in range(20)]
        return [one(normal(3), Draw(k)).token for k in kept]

    assert run(seed) == run(seed)
    assert run(seed) != run(5)


# -- temperatures (P2) -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1e-4, 1e-8, 1e-300, 5e-324])
def test_p2_tiny_temperatures_equal_greedy(temperature: float) -> None:
    for seed in range(20):
        row = normal(seed, 10)
        answers = [
            one(row, Draw(state(temperature=t, seed=seed, logprobs=3, logprobs_mode="processed")))
            for t in (0.0, temperature)
        ]
        assert answers[0].token == answers[1].token == int(row.argmax())
        assert answers[1].logprob is not None
        assert not math.isnan(answers[1].logprob.logprob)


def test_p2_greedy_takes_the_lower_of_equals_and_ignores_the_kept_set() -> None:
    row = np.array([0, 3, 1, 3] + [0] * (VOCAB - 4), np.float32)
    for number in range(10):
        assert one(row, Draw(state(top_k=2, top_p=0.9, min_p=0.5, seed=number))).token == 1


# -- penalties (P4) ----------------------------------------------------------------------------------------------------


def test_p4_presence_and_frequency_count_the_answer_alone_and_repetition_counts_both() -> None:
    drum, row = 4, normal(5)
    row[2], row[drum] = -1.5, 2.0

    def logits(answer: tuple[int, ...], **params: Any) -> np.ndarray:
        """By log-probabilities of the processed logits."""
        asked = state((2, drum, drum, drum, *answer), 4, logprobs=VOCAB, logprobs_mode="processed", **params)
        logprob = one(row, Draw(asked)).logprob
        assert logprob is not None
        found = dict(logprob.top)
        return np.array([found[i] for i in range(VOCAB)]) - found[0]

    plain = logits(())
    assert (logits((), presence_penalty=2) == plain).all()
    assert (logits((), frequency_penalty=2) == plain).all()
    moved = logits((), repetition_penalty=1.5)
    assert np.flatnonzero(np.abs(moved - plain) > 1e-5).tolist() == [2, drum]
    assert moved[drum] - plain[drum] == pytest.approx(2.0 / 1.5 - 2.0, abs=1e-5)
    assert moved[2] - plain[2] == pytest.approx(-1.5 * 1.5 + 1.5, abs=1e-5)
    answer = (drum, drum)  # the same whether it was generated just now or came back after a preemption
    assert logits(answer, presence_penalty=2)[drum] - plain[drum] == pytest.approx(-2, abs=1e-5)
    assert logits(answer, frequency_penalty=2)[drum] - plain[drum] == pytest.approx(-4, abs=1e-5)


@pytest.mark.parametrize("penalty", [5e-324, 1e-40, 1e300])
@pytest.mark.parametrize("logit", [3.0, -3.0, 0.0, BIG, -BIG])
def test_extreme_penalties_stay_finite_and_never_allow_a_banned_token(penalty: float, logit: float) -> None:
    row = normal(1)
    row[1], row[2] = logit, -np.inf
    asked = state((1, 2), 1, repetition_penalty=penalty, frequency_penalty=-2.0, temperature=1.0)
    line = row.copy()
    asked.touch(line, 0)
    assert np.isfinite(line[1])
    assert line[2] == -np.inf
    assert one(row, Draw(asked)).error is None


# -- log-probabilities -------------------------------------------------------------------------------------------------


def test_raw_logprobs_are_those_before_bias_penalties_and_temperature() -> None:
    row = normal(8)
    params: dict[str, Any] = {"logit_bias": {3: 50.0}, "repetition_penalty": 2.0, "logprobs": 5}
    for temperature in (0.0, 0.5):
        raw, cooked = (
            one(row, Draw(state(temperature=temperature, logprobs_mode=mode, **params)))
            for mode in ("raw", "processed")
        )
        assert raw.token == cooked.token == 3
        assert raw.logprob is not None
        assert cooked.logprob is not None
        close(raw.logprob, score(row, 3, 5))
        assert raw.logprob.rank > 1
        assert cooked.logprob.rank == 1
        assert cooked.logprob.logprob == pytest.approx(0, abs=1e-6)


@given(lines, token_ids, st.integers(0, 30))
@settings(max_examples=100, deadline=None)
def test_scores_of_known_tokens(row: np.ndarray, token: int, k: int) -> None:
    if np.isneginf(row).all():
        assert one(row, Score(token, k)) == Answer(error=NOT_FINITE)
        return
    got = one(row, Score(token, k))
    assert got.token is None
    assert got.logprob is not None
    close(got.logprob, score(row, token, k))


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.nan])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"logprobs": 1}, {"logit_bias": {3: 1.0}}])
def test_an_error_is_its_line_s_alone(bad: float, params: dict[str, Any]) -> None:
    good, row = normal(1), normal(2)
    row[VOCAB - 1] = bad
    masked = state(eos=(VOCAB - 1,), min_tokens=2, **params)  # masking the token hides nothing
    got = reduce(
        np.stack([good, row, row, good, row]),
        [Draw(state(**params)), Draw(state()), Draw(masked), Score(1, 1), Score(1, 1)],
    )
    assert [a.error for a in got] == [None, NOT_FINITE, NOT_FINITE, None, NOT_FINITE]
    assert got[0] == one(good, Draw(state(**params)))
    assert got[3] == one(good, Score(1, 1))


def test_all_minus_infinity_is_an_error_and_some_is_not() -> None:
    row = np.full(VOCAB, -np.inf, np.float32)
    assert one(row, Draw(state())).error == NOT_FINITE
    row[5] = -BIG
    for temperature in (0.0, 1.0):
        assert one(row, Draw(state(temperature=temperature))).token == 5
    assert one(row, Draw(state(eos=(5,), min_tokens=1))).error == NOTHING_LEFT


def test_min_tokens_masks_until_it_is_reached() -> None:
    row = normal(1)
    row[[4, 6]] = 50, 40
    eos = (4, 6, VOCAB + 3)  # an id beyond the logits cannot be chosen anyway
    for answer in range(4):
        got = one(row, Draw(state((1, *[2] * answer), 1, eos, min_tokens=2))).token
        assert (got == 4) == (answer >= 2)
        assert answer >= 2 or got not in eos
