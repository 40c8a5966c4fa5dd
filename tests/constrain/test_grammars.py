"""Every kind of grammar on SmolLM2's vocabulary: what it allows, what is refused and how, what it costs."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from headrace.constrain.compiler import KEPT, Compiler
from headrace.constrain.constraint import Constraint, ConstraintError
from headrace.constrain.guided import Guided
from headrace.errors import RequestError
from headrace.params import MAX_GRAMMAR_CHARS, Grammar, Reasoning, SamplingParams
from headrace.tokenize.tokenizer import Tokenizer

WIDTH = 49152 + 70
"""Wider than the tokenizer, as in many models."""


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Compiler:
    return Compiler(tokenizer, WIDTH, tokenizer.eos)


@pytest.fixture(scope="module")
def starts(compiler: Compiler) -> Callable[..., Guided]:
    def start(kind: str, source: Any) -> Guided:
        text = source if isinstance(source, str) else json.dumps(source, ensure_ascii=False)
        return compiler.compiled(Grammar(kind, text)).constraint()

    return start


def tokens_of(constraint: Constraint) -> set[int]:
    line = np.zeros(-(-WIDTH // 32), np.uint32)
    constraint.fill(line)
    return set(np.flatnonzero(np.unpackbits(line.view(np.uint8), bitorder="little")).tolist())


def reads(constraint: Constraint, tokenizer: Tokenizer, text: str) -> bool:
    """Does it allow all of a text, token by token, and may the answer end there?"""
    for token in tokenizer.encode(text, parse_special=False, add_bos=False):
        if token not in tokens_of(constraint):
            return False
        constraint.take(token)
    return constraint.accepting


def written(constraint: Constraint, tokenizer: Tokenizer, seed: int, most: int = 400) -> tuple[str, bool]:
    """An answer drawn at random, and whether it came to its end. It ends as soon as it may half of the time."""
    rng, taken = random.Random(seed), []
    while len(taken) < most and not constraint.done:
        if constraint.accepting and rng.random() < 0.5:
            break
        token = rng.choice(sorted(tokens_of(constraint)))
        constraint.take(token)
        taken.append(token)
    return tokenizer.decode(taken), constraint.accepting


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("kind", "source", "right", "wrong"),
    [
        ("json", PERSON, ['{"name": "Ann", "age": 3}', '{"name":"","age":0}'], ['{"age": 3}', '{"name":"","age":-1}']),
        ("json", {"type": "object"}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "{", "x"]),
        ("json", True, ["1", "null", '"x"'], ["x", ""]),
        ("regex", "MONDAYT(UESDAY)?", ["MONDAYT", "MONDAYTUESDAY"], ["MONDAY", "xMONDAYT", "MONDAYTx"]),
        ("regex", "[a-zé]{2,4}", ["ab", "éé"], ["a", "abcde", "A"]),
        ("choice", ["yes", 'a "quoted" one\n', "\\d"], ["yes", 'a "quoted" one\n', "\\d"], ["no", "ye", "\\", "1"]),
        ("lark", 'start: word (" " word)*\nword: /[a-z]+/', ["one two", "a"], ["", "one  two", "1"]),
        ("gbnf", 'root ::= "x" num\nnum ::= [0-9]+', ["x1", "x123"], ["x", "1"]),
    ],
)  # fmt: skip
def test_a_grammar_allows_its_sentences(
    kind: str,
    source: Any,
    right: Sequence[str],
    wrong: Sequence[str],
    starts: Callable[..., Guided],
    tokenizer: Tokenizer,
) -> None:
    assert all(reads(starts(kind, source), tokenizer, text) for text in right)
    assert not any(reads(starts(kind, source), tokenizer, text) for text in wrong)


@pytest.mark.parametrize("seed", range(8))
def test_every_way_through_is_a_sentence(seed: int, starts: Callable[..., Guided], tokenizer: Tokenizer) -> None:
    text, ended = written(starts("json", PERSON), tokenizer, seed)
    if ended:
        found = json.loads(text)
        assert found.keys() == {"name", "age"} and isinstance(found["name"], str) and found["age"] >= 0
    text, ended = written(starts("regex", "(ab|c){3,9}d?"), tokenizer, seed)
    assert ended and re.fullmatch("(ab|c){3,9}d?", text)


def test_no_end_and_no_control_token_stands_inside(starts: Callable[..., Guided], tokenizer: Tokenizer) -> None:
    """What ends an answer is decided outside; ids beyond the tokenizer's last are no tokens."""
    inside = starts("json", {"type": "string"})
    for token in tokenizer.encode('"abc', parse_special=False, add_bos=False):
        inside.take(token)
    allowed = tokens_of(inside)
    assert len(allowed) > 20_000
    assert not allowed & (tokenizer.special_ids - tokenizer.eos)
    assert max(allowed) < tokenizer.vocab_size


def test_done_where_nothing_can_follow(starts: Callable[..., Guided], tokenizer: Tokenizer) -> None:
    closed, open_ = starts("regex", "ab"), starts("regex", "ab*")
    for token in tokenizer.encode("ab", parse_special=False, add_bos=False):
        assert not closed.done
        closed.take(token)
        open_.take(token)
    assert closed.done and closed.accepting and tokens_of(closed) == set()
    assert not open_.done and open_.accepting


def test_rollback_is_exact(starts: Callable[..., Guided], tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode('{"name": "Ann", "age": 31}', parse_special=False, add_bos=False)
    for back in range(1, len(ids) + 1):
        it, other = starts("json", PERSON), starts("json", PERSON)
        for token in ids:
            it.take(token)
        it.rollback(back)
        for token in ids[: len(ids) - back]:
            other.take(token)
        assert (it.accepting, it.done) == (other.accepting, other.done)
        assert tokens_of(it) == tokens_of(other)


def test_answers_of_one_grammar_do_not_touch_each_other(starts: Callable[..., Guided], tokenizer: Tokenizer) -> None:
    one, other = starts("json", PERSON), starts("json", PERSON)
    before = tokens_of(other)
    assert reads(one, tokenizer, '{"name": "Ann", "age": 31}')
    assert tokens_of(other) == before
    assert reads(other, tokenizer, '{"name": "B", "age": 1}')


def test_a_token_that_was_not_allowed_is_told(starts: Callable[..., Guided]) -> None:
    it = starts("regex", "ab")
    it.take(tokenless := next(iter(set(range(100, 200)) - tokens_of(it))))
    assert not it.accepting and not it.done, tokenless
    with pytest.raises(ConstraintError):
        tokens_of(it)


def test_g3_blanks_between_the_parts_of_a_document_are_bounded(
    starts: Callable[..., Guided], tokenizer: Tokenizer
) -> None:
    """Case G3: eight at most; inside strings as many as there are."""
    for blanks, right in ((0, True), (1, True), (8, True), (9, False), (40, False)):
        for text in ('{%s"name": "A", "age": 3}', '{"name":%s"A", "age": 3}', '{"name": "A"%s, "age": 3%s}'):
            sample = text.replace("%s", " \n\t "[: blanks % 4] + " " * (blanks - blanks % 4))
            assert reads(starts("json", PERSON), tokenizer, sample) == right, sample
    assert reads(starts("json", PERSON), tokenizer, '{"name": "%s", "age": 3}' % (" " * 100))
    it = starts("json", PERSON)
    blank = set(tokenizer.encode(" ", parse_special=False, add_bos=False))
    it.take(tokenizer.encode("{", parse_special=False, add_bos=False)[0])
    taken = 0
    while blank & tokens_of(it):
        it.take(*blank)
        taken += 1
    assert taken == 8


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ("\\S", ["ab c", " a "], ["", "  "]),
        ("^[a-z]+$", ["abc"], ["ab1", "1ab", " ab"]),
        ("^a", ["a", "abc"], ["ba"]),
        ("c$", ["c", "abc"], ["cb"]),
        ("b|d", ["abc", "d"], ["ac"]),
    ],
)
def test_g1_a_pattern_may_match_anywhere(
    pattern: str, right: Sequence[str], wrong: Sequence[str], starts: Callable[..., Guided], tokenizer: Tokenizer
) -> None:
    """As JSON Schema has it: what should be the whole text has anchors."""
    for text in (*right, *wrong):
        found = reads(starts("json", {"type": "string", "pattern": pattern}), tokenizer, json.dumps(text))
        assert found == (text in right), text


def test_g4_nothing_follows_a_whole_document(starts: Callable[..., Guided], tokenizer: Tokenizer) -> None:
    """Only its end is left, and no blanks."""
    for schema, text in ((PERSON, '{"name": "Ann", "age": 31}'), ({"type": "object"}, "{}"), ({"enum": ["a"]}, '"a"')):
        it = starts("json", schema)
        assert reads(it, tokenizer, text)
        assert it.done and tokens_of(it) == set(), text


def test_a6_a_grammar_begins_after_the_thinking(
    compiler: Compiler, starts: Callable[..., Guided], tokenizer: Tokenizer
) -> None:
    begin, end = 5, 6
    grammar = Grammar("regex", "ab")
    for begun in (False, True):
        it = compiler.constraint(SamplingParams(grammar=grammar, reasoning=Reasoning(begin, end, begun=begun)))
        assert it is not None
        for token in ([] if begun else [begin]) + [17, 18, 19]:
            it.take(token)
            assert len(tokens_of(it)) > 40_000 and not it.accepting
        it.take(end)
        assert tokens_of(it) == tokens_of(starts("regex", "ab"))


@pytest.mark.parametrize(
    "pattern", ["[", "(", "*a", "(?<=x)+", "a{999999999}", "(((a{100}){100}){100}){100}", "a{2000}{2000}", "[^\\s\\S]"]
)
def test_g5_a_bad_regex_is_refused(pattern: str, starts: Callable[..., Guided]) -> None:
    with pytest.raises(RequestError, match="the regex grammar") as refused:
        starts("regex", pattern)
    assert refused.value.param == "grammar" and len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("kind", "source", "said"),
    [
        ("regex", "ab(c", "unclosed group, at character 3 of ab(c"),
        ("regex", "[z-a]", "invalid character class range, the start must be <= the end, at character 2 of [z-a]"),
        ("regex", "(" + "x" * 5000, "unclosed group, at character 1 of (" + "x" * 265 + "..."),
        ("regex", "a\n(b", r"unclosed group, at character 4 of a\n(b"),
        ("regex", r"[^\s\S]", "nothing satisfies it"),
        ("gbnf", "root ::= [z-a]", "invalid character class range, the start must be <= the end, at character 2 of "
         "[z-a]"),
        ("lark", "start: a\na: /(b/", "line 2, column 4: unclosed group, at character 1 of (b"),
        ("lark", "start: a\na: /(\nb/", "line 2, column 4: unclosed group, in a regular expression of several lines"),
        ("lark", "start: nowhere", 'line 1, column 8: unknown name: "nowhere"'),
        ("lark", "start a", """line 1, column 7: Expected token ':', found "a\""""),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_first_and_plainly(
    kind: str, source: str, said: str, starts: Callable[..., Guided]
) -> None:
    """Where it is too, in the client's own text, and none of the library's."""
    with pytest.raises(RequestError) as refused:
        starts(kind, source)
    assert str(refused.value) == f"the {kind} grammar cannot be honoured: {said}"


def test_g5_a_regex_that_backtracking_engines_fear_is_served(
    starts: Callable[..., Guided], tokenizer: Tokenizer
) -> None:
    assert reads(starts("regex", "(a|a)*b" * 20), tokenizer, "ab" * 20)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "strnig"},
        {"type": 5},
        [],
        {"enum": []},
        {"type": "integer", "minimum": 5, "maximum": 1},
        {"type": "array", "minItems": 3, "maxItems": 1},
        False,
        {"$ref": "#"},
    ],
)
def test_g5_a_bad_schema_is_refused(schema: Any, starts: Callable[..., Guided]) -> None:
    with pytest.raises(RequestError) as refused:
        starts("json", schema)
    assert (refused.value.param or "").startswith("grammar")


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("lark", "start: nowhere"),
        ("lark", "begin: /a/"),
        ("lark", "%%"),
        ("gbnf", "root ::= other"),
        ("gbnf", "::="),
        ("choice", '["a", 1]'),
        ("choice", "[]"),
        ("choice", '[""]'),
        ("choice", "{}"),
        ("json", "{bad"),
        ("json", "[" * 100_000),
    ],
)
def test_malformed_grammars_are_refused(kind: str, source: str, starts: Callable[..., Guided]) -> None:
    with pytest.raises(RequestError) as refused:
        starts(kind, source)
    assert refused.value.param == "grammar"


def test_what_can_be_judged_without_a_model_is() -> None:
    for kind, source in (("xml", "x"), ("regex", ""), ("regex", "a" * (MAX_GRAMMAR_CHARS + 1)), ("regex", 5)):
        with pytest.raises(RequestError):
            Grammar(kind, source)  # type: ignore[arg-type]
    with pytest.raises(RequestError):
        SamplingParams(grammar="a*")  # type: ignore[arg-type]


def test_compiled_once_while_somebody_holds_it(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(tokenizer, WIDTH, tokenizer.eos)
    count = 0
    made = Guided.of

    def counted(*given: Any) -> Guided:
        nonlocal count
        count += 1
        return made(*given)

    monkeypatch.setattr(Guided, "of", counted)
    held = compiler.compiled(Grammar("regex", "first"))
    for number in range(2 * KEPT):
        compiler.compiled(Grammar("regex", f"other{number}"))
    assert compiler.compiled(Grammar("regex", "first")) is held
    assert count == 1 + 2 * KEPT
    compiler.compiled(Grammar("regex", "other0"))  # nobody held it
    assert count == 2 + 2 * KEPT


def test_many_threads_compile_and_use_at_once(tokenizer: Tokenizer) -> None:
    compiler = Compiler(tokenizer, WIDTH, tokenizer.eos)
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            for turn in range(6):
                grammar = Grammar("regex", f"x{(number + turn) % 3}y+")
                assert reads(compiler.compiled(grammar).constraint(), tokenizer, f"x{(number + turn) % 3}yyyy")
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
