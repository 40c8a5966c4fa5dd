"""The page on constrained output says what the code does: every keyword in its row, every limit."""

from __future__ import annotations

import re
from pathlib import Path

from headrace.constrain import keywords, lark, numbers, patterns, schema
from tests.constrain.schemas import ANSWERED

PAGE = (Path(__file__).parents[2] / "docs" / "techniques" / "constrained-output.md").read_text()


def row(name: str) -> set[str]:
    found = re.search(rf"^\| {re.escape(name)} \| (.*) \|$", PAGE, re.MULTILINE)
    assert found is not None
    return set(re.findall("`([^`]*)`", found[1]))


def test_every_keyword_stands_in_its_row() -> None:
    assert row("honoured") == set(keywords.HONOURED)
    assert row("left out") == set(keywords.ANNOTATIONS)
    assert row("refused") == set(keywords.REFUSED)
    assert row("of strings") == set(keywords.FORMATS)
    assert row("of integers, ranges") == set(keywords.RANGES)
    assert row("any value") == set(keywords.FREE_FORMATS)
    every = (*keywords.HONOURED, *keywords.ANNOTATIONS, *keywords.REFUSED)
    assert len(every) == len(set(every))


def test_every_limit_is_told() -> None:
    limits = (
        *(schema.SCHEMAS, schema.WRITTEN_OUT, schema.DEPTH, schema.VALUES, schema.TEXT, schema.TEXTS, schema.LENGTH),
        *(schema.COUNT, 4 * schema.COUNT, schema.MEETING, numbers.MULTIPLE, patterns.WEIGHT),
        sum(map(len, ANSWERED.values())),
    )
    told = set(re.findall(r"\d[\d,]*", PAGE))
    assert {f"{limit:,}" for limit in limits} <= {number.rstrip(",") for number in told}


def test_every_refused_word_of_lark_is_told() -> None:
    outside = PAGE.partition("## Grammars from outside")[2]
    assert {*lark._DIRECTIVES, *lark._OPTIONS} <= set(re.findall("`([^`]*)`", outside))


def test_every_honoured_keyword_is_among_the_schemas() -> None:
    text = repr(ANSWERED)
    assert not [word for word in keywords.HONOURED if f"'{word}'" not in text]
    assert not [name for name in keywords.FORMATS if f"'{name}'" not in text]
