"""Requests are judged against model and limits before anything of them runs: cases V1, V2, V5 and K1."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import pytest

from headrace.engine.admission import LONGEST, Limits, admit, cut, reads
from headrace.errors import RequestError
from headrace.params import SamplingParams


@dataclass(frozen=True)
class Suggested:
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


LIMITS = Limits(context=512, vocab=100, pool_tokens=10_000)
SMALL_POOL = Limits(context=512, vocab=100, pool_tokens=200)


def judge(prompt: Any, limits: Limits = LIMITS, **params: Any) -> SamplingParams:
    return admit(prompt, SamplingParams(**params), limits=limits, defaults=Suggested())


def refusal(prompt: Any, limits: Limits = LIMITS, **params: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        judge(prompt, limits, **params)
    return caught.value


def test_empty_prompt_is_refused_under_the_clients_name() -> None:
    assert refusal([]).param == "prompt"
    with pytest.raises(RequestError, match="messages is empty") as caught:
        admit([], SamplingParams(), limits=LIMITS, defaults=Suggested(), param="messages")
    assert caught.value.param == "messages"


@pytest.mark.parametrize("bad", [-1, 100, 2**63, True, 1.0, "1", None, float("nan")])
def test_prompt_ids_are_below_the_width_of_the_logits(bad: object) -> None:
    error = refusal([1, bad, 2])
    assert error.param == "prompt"
    assert "0 to 99" in str(error)


def test_the_last_id_is_allowed() -> None:
    judge([0, 99], stop_token_ids=[99], logit_bias={"99": 5}, min_tokens=2)


@pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias"])
@pytest.mark.parametrize("bad", [100, 2**63])
def test_other_ids_too(field: str, bad: int) -> None:
    error = refusal([1], **{field: [bad] if field == "stop_token_ids" else {bad: 5}}, min_tokens=3)
    assert (error.param or "").startswith(field)
    assert str(bad) in str(error)


def test_the_id_at_fault_is_named() -> None:
    assert refusal([1], stop_token_ids=[5, 100]).param == "stop_token_ids[1]"
    assert refusal([1], logit_bias={5: 1, 100: 1}).param == "logit_bias.100"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [1.5]),
        ("logit_bias", {"cat": -100}),
        ("logit_bias", {"1": 1e9}),
        ("logit_bias", {"1": float("nan")}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {True: 1}),
    ],
)
def test_what_is_no_id_at_all(field: str, value: object) -> None:
    assert (refusal([1], **{field: value}).param or "").startswith(field)


def test_explicit_max_tokens_that_does_not_fit() -> None:
    error = refusal([1] * 8, max_tokens=510)
    assert error.param == "max_tokens"
    for number in ("510", " 8 ", "512", "504"):
        assert number in str(error)
    assert judge([1] * 8, max_tokens=504).max_tokens == 504
    assert refusal([1] * 8, max_tokens=505).param == "max_tokens"
    assert refusal([1], max_tokens=2**31 - 1).param == "max_tokens"


def test_prompt_against_context() -> None:
    error = refusal([1] * 600)
    assert error.param == "prompt"
    for number in ("600", "512", "511"):
        assert number in str(error)
    assert judge([1] * 511).max_tokens is None
    assert judge([1] * 511, max_tokens=1).max_tokens == 1
    assert refusal([1] * 512).param == "prompt"
    assert refusal([1] * 512, max_tokens=1).param == "prompt"


def test_only_the_prompt_may_fill_the_context() -> None:
    assert judge([1] * 512, max_tokens=0, prompt_logprobs=0).max_tokens == 0
    assert refusal([1] * 513, max_tokens=0, prompt_logprobs=0).param == "prompt"


def test_a_long_prompt_is_refused_before_its_ids_are_looked_at() -> None:
    assert "1000000 tokens" in str(refusal([-1] * 1_000_000))


def test_prompt_against_pool() -> None:
    error = refusal([1] * 201, SMALL_POOL)
    assert error.param == "prompt"
    for word in ("201", "200", "pool_bytes"):
        assert word in str(error)
    judge([1] * 200, SMALL_POOL)
    judge([1] * 199, SMALL_POOL)
    judge([1] * 200, SMALL_POOL, max_tokens=0, prompt_logprobs=0)


def test_an_answer_may_outgrow_the_pool() -> None:
    assert judge([1] * 150, SMALL_POOL, max_tokens=300).max_tokens == 300


def test_min_tokens_must_be_within_reach() -> None:
    judge([1] * 500, min_tokens=12)
    error = refusal([1] * 500, min_tokens=13)
    assert error.param == "min_tokens"
    assert "12" in str(error)
    judge([1] * 150, SMALL_POOL, min_tokens=51)
    assert refusal([1] * 150, SMALL_POOL, min_tokens=52).param == "min_tokens"


def test_defaults_in_order() -> None:
    nothing = judge([1])
    assert (nothing.temperature, nothing.top_p, nothing.top_k, nothing.min_p) == (1, 1, 0, 0)
    assert nothing.repetition_penalty == 1
    suggested = Suggested(temperature=0.6, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.1)
    filled = admit([1], SamplingParams(), limits=LIMITS, defaults=suggested)
    asked = SamplingParams(temperature=0, top_p=1, top_k=0, min_p=0, repetition_penalty=2)
    kept = admit([1], asked, limits=LIMITS, defaults=suggested)
    for f in fields(Suggested):
        assert getattr(filled, f.name) == getattr(suggested, f.name)
        assert getattr(kept, f.name) == getattr(asked, f.name)
    assert kept.max_tokens is kept.logprobs is kept.prompt_logprobs is None


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_a_seed_is_kept(seed: int) -> None:
    assert judge([1], seed=seed).seed == seed


def test_a_seed_is_drawn() -> None:
    seeds = {judge([1]).seed for _ in range(50)}
    assert len(seeds) == 50
    assert all(s is not None and 0 <= s < 2**63 for s in seeds)


def test_nothing_else_changes() -> None:
    params = SamplingParams(n=3, stop=("a", "b"), logit_bias={"5": -1}, min_tokens=2, logprobs=3, ignore_eos=True)
    out = admit([1], params, limits=LIMITS, defaults=Suggested())
    resolved = {f.name for f in fields(Suggested)} | {"seed"}
    for f in fields(SamplingParams):
        if f.name not in resolved:
            assert getattr(out, f.name) == getattr(params, f.name)


@pytest.mark.parametrize("overflow", ["sliding", "sinks"])
def test_windows_take_any_length(overflow: str) -> None:
    judge([1] * 10_000, overflow=overflow)
    judge([1] * 10_000, SMALL_POOL, overflow=overflow, max_tokens=100_000, min_tokens=90_000)
    judge([1] * 10_000, overflow=overflow, max_tokens=0, prompt_logprobs=2)
    assert refusal([], overflow=overflow).param == "prompt"
    assert refusal([100], overflow=overflow).param == "prompt"
    error = refusal([1], Limits(context=512, vocab=100, pool_tokens=15), overflow=overflow)
    assert error.param == "overflow"
    assert "at least 16" in str(error) and "pool holds 15" in str(error)
    judge([1], Limits(context=16, vocab=100, pool_tokens=16), overflow=overflow)


@pytest.mark.parametrize(
    ("length", "limits", "asked", "left"),
    [
        (511, LIMITS, None, 511),
        (512, LIMITS, None, 384),
        (5000, LIMITS, None, 384),
        (400, LIMITS, 112, 400),
        (401, LIMITS, 112, 400),
        (5000, LIMITS, 384, 128),
        (200, SMALL_POOL, None, 200),
        (201, SMALL_POOL, None, 151),
        (190, SMALL_POOL, 300, 190),
        (5000, SMALL_POOL, 300, 150),
        (5000, SMALL_POOL, 20, 180),
    ],
)
def test_a_middle_is_left_out_so_that_the_answer_fits(
    length: int, limits: Limits, asked: int | None, left: int
) -> None:
    params = SamplingParams(overflow="truncate-middle", max_tokens=asked)
    prompt = list(range(length))
    kept = list(cut(prompt, params, limits))
    assert len(kept) == left
    head = left - left // 2 if left < length else length
    assert kept == prompt[:head] + (prompt[-(left // 2) :] if left < length else [])
    admit([1] * length, params, limits=limits, defaults=Suggested())


def test_a_middle_is_not_left_out_where_nobody_asked() -> None:
    for overflow in ("error", "sliding", "sinks"):
        assert len(cut([1] * 5000, SamplingParams(overflow=overflow), LIMITS)) == 5000
    error = refusal([1] * 5000, overflow="truncate-middle", prompt_logprobs=0)
    assert error.param == "prompt_logprobs"
    assert "leaves 384" in str(error)
    judge([1] * 500, overflow="truncate-middle", prompt_logprobs=0)


@pytest.mark.parametrize("asked", [385, 509, 512, 10_000])
def test_an_answer_that_leaves_the_prompt_no_room_is_refused(asked: int) -> None:
    error = refusal([1] * 5000, overflow="truncate-middle", max_tokens=asked)
    assert error.param == "max_tokens"
    assert "5000" in str(error)
    assert "-" not in str(error).replace("truncate-middle", ""), "no number of tokens is below zero"


def test_refusals_name_the_way_out() -> None:
    assert "overflow" in str(refusal([1] * 600))


def test_windows_have_bounds_too() -> None:
    judge([1] * (LONGEST // 4), overflow="sliding", n=4)
    error = refusal([1] * (LONGEST // 4 + 1), overflow="sliding", n=4)
    assert error.param == "prompt"
    assert str(LONGEST) in str(error)
    judge([1] * LONGEST, overflow="sliding", prompt_logprobs=0)
    judge([1] * 500, overflow="sliding", prompt_logprobs=100)
    judge([1] * (LONGEST // 101), overflow="sliding", prompt_logprobs=100)
    error = refusal([1] * (LONGEST // 101 + 1), overflow="sliding", prompt_logprobs=100)
    assert error.param == "prompt_logprobs"
    assert str(LONGEST) in str(error)
    judge([1], overflow="sinks", min_tokens=512)
    assert refusal([1], overflow="sinks", min_tokens=513).param == "min_tokens"


# ---- truncate_prompt_tokens, and vectors instead of answers


@pytest.mark.parametrize(
    ("asked", "max_tokens", "left"),
    [(1, 4, 1), (40, 4, 40), (512, 0, 512), (-1, 4, 508), (-1, None, 511), (-1, 0, 512), (300, None, 300)],
)
def test_the_last_tokens_are_kept(asked: int, max_tokens: int | None, left: int) -> None:
    prompt = [n % 100 for n in range(5000)]
    params = judge(prompt, truncate_prompt_tokens=asked, max_tokens=max_tokens, prompt_logprobs=0)
    assert cut(prompt, params, LIMITS) == prompt[-left:]
    assert reads(5000, params, LIMITS) == left
    assert cut(prompt[:left], params, LIMITS) == prompt[:left], "a shorter one stays whole"


def test_what_cannot_be_truncated() -> None:
    assert refusal([1] * 600, truncate_prompt_tokens=513).param == "truncate_prompt_tokens"
    assert refusal([1] * 600, truncate_prompt_tokens=510, max_tokens=4).param == "max_tokens"
    assert refusal([1] * 600, truncate_prompt_tokens=-1, max_tokens=512).param == "max_tokens"
    assert refusal([], truncate_prompt_tokens=-1).param == "prompt"
    for asked in (0, -2, 2**31):
        with pytest.raises(RequestError, match="truncate_prompt_tokens"):
            SamplingParams(truncate_prompt_tokens=asked)
    with pytest.raises(RequestError, match="give one of them"):
        SamplingParams(truncate_prompt_tokens=5, overflow="sinks")


@pytest.mark.parametrize(
    "other", [{"max_tokens": 1}, {"n": 2}, {"prompt_logprobs": 0}, {"overflow": "sliding"}, {"pooling": "cls"}]
)
def test_a_vector_excludes_an_answer(other: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**{"pooling": "mean", "max_tokens": 0} | other)
    assert error.value.param == "pooling"
