"""SamplingParams judges what can be judged without a model, and names the field."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from headrace.errors import OptionError, RequestError
from headrace.params import MAX_STOP_CHARS, MAX_STOPS, SamplingParams

REFUSED: list[tuple[str, Any]] = [
    *[("n", v) for v in (0, -1, 129, 1.0, True, "2", None)],
    *[("temperature", v) for v in (-1, -1e-9, math.nan, math.inf, "0.7", True)],
    *[("top_p", v) for v in (0, 0.0, 1.0001, -0.5, math.nan, "1", True)],
    *[("top_k", v) for v in (-2, 1.5, "3", True, 2**63)],
    *[("min_p", v) for v in (-0.1, 1.1, math.nan, True)],
    *[("repetition_penalty", v) for v in (0, -1, math.nan, math.inf)],
    *[("presence_penalty", v) for v in (-2.1, 2.1, math.nan, None, "x")],
    *[("frequency_penalty", v) for v in (-2.1, 2.1, math.nan, None)],
    *[("seed", v) for v in (2**63, -(2**63) - 1, 1.5, "1", True)],
    *[("max_tokens", v) for v in (0, -1, 1.5, 10**12, True)],
    *[("min_tokens", v) for v in (-1, 1.5, None)],
    *[("logprobs", v) for v in (-1, 101, True, 1.0)],
    *[("prompt_logprobs", v) for v in (-1, 101, True)],
    *[("logprobs_mode", v) for v in ("", "Raw", None)],
    *[("overflow", v) for v in ("", "Error", "truncate", None, 1)],
    *[("ignore_eos", v) for v in (None, 1, "true")],
    *[("skip_special_tokens", v) for v in (None, 0)],
    *[("stop", v) for v in ("", ["", "x"], ["x"] * (MAX_STOPS + 1), "x" * (MAX_STOP_CHARS + 1), 5, [5])],
    *[("stop_token_ids", v) for v in ([-1], [True], [1.0], ["1"], "1", 5)],
    *[
        ("logit_bias", v)
        for v in ({"cat": 1}, {"1": 1e9}, {"1": "NaN"}, {1: math.nan}, {-1: 1}, {True: 1}, {"²": 1}, [1])
    ],
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**{name: value})
    assert re.split(r"[.[]", error.value.param or "")[0] == name
    assert name in str(error.value)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ["a", 3]}, "stop[1]"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a", "b", "x" * (MAX_STOP_CHARS + 1)]}, "stop[2]"),
        ({"stop": ""}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        ({"logit_bias": {"1": 5, "2": 101}}, "logit_bias.2"),
        ({"logit_bias": {1: "x"}}, "logit_bias.1"),
        ({"logit_bias": {"1": 1, 1: 2}}, "logit_bias.1"),
        ({"logit_bias": {"cat": 1}}, "logit_bias.cat"),
        ({"logit_bias": {"9" * 5000: 1}}, f"logit_bias.{'9' * 128}"),
        ({"logit_bias": {True: 1}}, "logit_bias"),
    ],
)
def test_the_entry_at_fault_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**fields)
    assert error.value.param == param


ACCEPTED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 5e-324},
    {"top_k": -1},
    {"top_k": 0},
    {"top_k": 10**9},
    {"top_p": 1},
    {"min_p": 0},
    {"min_p": 1},
    {"seed": 0},
    {"seed": -1},
    {"seed": 2**63 - 1},
    {"max_tokens": 0, "prompt_logprobs": 0},
    {"max_tokens": None},
    {"stop": None},
    {"stop": []},
    {"logit_bias": None},
    {"logit_bias": {"7": -100, 8: 100}},
]


@pytest.mark.parametrize("fields", ACCEPTED)
def test_accepted(fields: dict[str, Any]) -> None:
    SamplingParams(**fields)


def test_spellings_are_made_one() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[3], logit_bias={"7": 1})
    assert params.stop == ("END",)
    assert params.stop_token_ids == (3,)
    assert params.logit_bias == {7: 1.0}


def test_min_above_max_is_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens is 5, more than max_tokens, 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_options_name_what_is_wrong() -> None:
    from headrace.config import Options

    assert Options.of(budget=7, context=9).scheduler.budget == 7
    for bad in ({"budget": 0}, {"context": -1}, {"kv_format": "f8"}, {"threads": True}, {"colour": "red"}):
        with pytest.raises(OptionError) as error:
            Options.of(**bad)
        assert error.value.option == next(iter(bad))


@pytest.mark.parametrize("field", ["temperature", "repetition_penalty", "presence_penalty"])
def test_numbers_beyond_floats(field: str) -> None:
    with pytest.raises(RequestError, match=field):
        SamplingParams(**{field: 10**400})


def test_a_token_id_of_many_digits() -> None:
    with pytest.raises(RequestError, match="no token id"):
        SamplingParams(logit_bias={"9" * 5000: 1.0})  # type: ignore[dict-item]


@pytest.mark.parametrize("field", ["seed", "top_k", "n", "max_tokens", "logprobs", "temperature"])
def test_numbers_that_python_does_not_write_out(field: str) -> None:
    with pytest.raises(RequestError, match=field):
        SamplingParams(**{field: 10**5000})


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {10**5000: 1}},
        {"logit_bias": {1: 10**5000}},
        {"logit_bias": {"01": 1}},
        {"logit_bias": {"1": 1, 1: 2}},
        {"stop_token_ids": [-(10**5000)]},
    ],
)
def test_odd_token_ids(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**fields)
    assert re.split(r"[.[]", error.value.param or "")[0] == next(iter(fields))
    assert len(str(error.value)) < 300
