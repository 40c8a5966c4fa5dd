"""JSON schemas, keyword by keyword: each answer is right by another's judgement, or the schema is refused by path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM
from headrace.constrain.compiler import Compiler
from headrace.constrain.constraint import Constraint
from headrace.constrain.schema import judged
from headrace.errors import RequestError
from headrace.params import Grammar, SamplingParams
from headrace.tokenize.tokenizer import Tokenizer
from tests.constrain.drawn import Drawer, faults
from tests.constrain.schemas import ANSWERED, REFUSED, Refused

WIDTH = 49152
DRAWN = 8
"""Answers of each schema that are drawn without a model."""
ASKED = 2
"""Answers of each schema by SmolLM2."""


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Compiler:
    return Compiler(tokenizer, WIDTH, tokenizer.eos)


@pytest.fixture(scope="module")
def drawer(tokenizer: Tokenizer) -> Drawer:
    return Drawer(tokenizer, WIDTH)


def grammar(schema: Any) -> Grammar:
    return Grammar("json", json.dumps(schema))


def test_there_are_enough() -> None:
    assert sum(map(len, ANSWERED.values())) >= 150


@pytest.mark.parametrize("group", ANSWERED)
def test_every_answer_is_right(group: str, compiler: Compiler, drawer: Drawer) -> None:
    wrong, whole = [], 0
    for schema in ANSWERED[group]:
        compiled = compiler.compiled(grammar(schema))
        texts = [drawer.answer(compiled.constraint(), seed) for seed in range(DRAWN)]
        ended = [text for text, accepting in texts if accepting]
        whole += bool(ended)
        wrong += [(schema, text, found) for text in ended if (found := faults(schema, text))]
    assert not wrong
    assert whole >= 0.9 * len(ANSWERED[group])


def test_every_answer_of_a_model_is_right(smollm2: Path, tmp_path: Path) -> None:
    """At temperature 1; what the length cuts is the beginning of an answer, and not judged."""
    schemas = [schema for group in ANSWERED.values() for schema in group]
    llm = LLM(smollm2, context=1024, threads=2, cache_dir=tmp_path)
    prompts = ["Answer in JSON. An example:"] * len(schemas)
    params = [
        SamplingParams(grammar=grammar(schema), temperature=1.0, max_tokens=96, n=ASKED, seed=number)
        for number, schema in enumerate(schemas)
    ]
    whole, wrong = 0, []
    for schema, answer in zip(schemas, llm.generate(prompts, params), strict=True):
        ended = [output.text for output in answer.outputs if output.finish_reason == "stop"]
        whole += bool(ended)
        wrong += [(schema, text, found) for text in ended if (found := faults(schema, text))]
        assert {output.finish_reason for output in answer.outputs} <= {"stop", "length"}
    assert not wrong
    assert whole >= 0.8 * len(schemas)


@pytest.mark.parametrize("case", [case for group in REFUSED.values() for case in group], ids=lambda case: case.path)
def test_what_cannot_be_honoured_is_refused_by_its_path(case: Refused, compiler: Compiler) -> None:
    with pytest.raises(RequestError) as refused:
        compiler.compiled(grammar(case.schema))
    assert refused.value.param == f"grammar{case.path}"
    assert len(str(refused.value)) < 600


def reads(constraint: Constraint, tokenizer: Tokenizer, text: str) -> bool:
    line = np.zeros(WIDTH // 32, np.uint32)
    for token in tokenizer.encode(text, parse_special=False, add_bos=False):
        constraint.fill(line)
        if not line[token // 32] >> np.uint32(token % 32) & np.uint32(1):
            return False
        constraint.take(token)
    return constraint.accepting


A = {"type": "object", "properties": {"a": {"type": "integer"}, "b/c": {"type": "integer"}}, "required": ["a"]}
XS = {"type": "object", "patternProperties": {"^x": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (A, '{"a": 1, "d": "x"}', '{"a": 1, "\\u0061": "x"}'),
        (A, '{"a": 1, "b\\nc": "x"}', '{"a": 1, "b\\/c": "x"}'),
        (A, '{"a": 1, "b/c": 2}', '{"a": 1, "a": "x"}'),
        (XS, '{"x1": 1, "y": "x"}', '{"\\u00781": "x"}'),
        ({**A, "additionalProperties": {"type": "string"}}, '{"a": 1, "ab": "x"}', '{"a": 1, "\\u0061": "x"}'),
    ],
)
def test_a_name_is_spelt_in_one_way(schema: Any, right: str, wrong: str, compiler: Compiler, tokenizer: Any) -> None:
    """Or what a reader finds under it were not what the schema has."""
    assert reads(compiler.compiled(grammar(schema)).constraint(), tokenizer, right)
    assert not reads(compiler.compiled(grammar(schema)).constraint(), tokenizer, wrong)
    inside = Grammar("lark", f"start: %json {judged(schema)}")
    assert not reads(compiler.compiled(inside).constraint(), tokenizer, wrong)
