"""Answers of every family into content and calls: the same however the text is cut, nothing lost, nothing invented."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.tokenize.tokenizer import Tokenizer
from headrace.tokenize.tools.calls import CallDelta, Calls, Event
from headrace.tokenize.tools.choose import form_of
from headrace.tokenize.tools.form import Form
from headrace.tokenize.tools.gemma import DESCRIBED_GEMMA, FUNCTION_GEMMA, GEMMA_4
from headrace.tokenize.tools.hermes import DESCRIBED_HERMES, HERMES
from headrace.tokenize.tools.llama import LLAMA
from headrace.tokenize.tools.mistral import MISTRAL_LIST, MISTRAL_NAMED
from headrace.tokenize.tools.reader import CallReader
from tests.tokenize.made import byte_level

FORMS = (HERMES, LLAMA, MISTRAL_LIST, MISTRAL_NAMED, FUNCTION_GEMMA, GEMMA_4, DESCRIBED_HERMES, DESCRIBED_GEMMA)
NAMES = ("f", "get_weather")

Told = tuple[str, list[tuple[str, str]]]
"""Content, and of each call its name and its arguments."""


def told(events: Iterable[Event]) -> Told:
    content, calls = "", []
    for event in events:
        if isinstance(event, str):
            content += event
        elif event.name is not None:
            assert event.index == len(calls), "calls are numbered as they begin"
            assert event.id
            calls.append((event.name, event.arguments))
        else:
            assert event.index == len(calls) - 1, "only the last call grows"
            assert event.id is None
            calls[-1] = (calls[-1][0], calls[-1][1] + event.arguments)
    return content, calls


def reader_of(
    form: Form, names: Iterable[str] = NAMES, most: int | None = None, controls: Iterable[str] = (), **how: bool
) -> CallReader:
    return CallReader(form, Calls(tuple(names), most, form.new_id), tuple(controls), **how)


def read(form: Form, parts: Iterable[str], **how: Any) -> Told:
    reader = reader_of(form, **how)
    return told([event for part in parts for event in reader.feed(part)] + reader.finish())


def marked(form: Form, text: str, *, shows: bool = False) -> Told:
    """The same where every tag is a control token, with its name in the text or hidden."""
    reader = reader_of(form, controls=form.tags)
    events: list[Event] = []
    while text:
        found = [(text.find(tag), tag) for tag in form.tags if tag in text]
        at, tag = min(found, default=(len(text), ""))
        events += reader.feed(text[:at])
        if tag:
            events += reader.mark(tag, tag if shows else "")
        text = text[at + len(tag) :]
    return told(events + reader.finish())


def everywhere_cut(form: Form, text: str, expected: Told, **how: bool) -> None:
    assert read(form, [text], **how) == expected
    assert read(form, text, **how) == expected, "character by character"
    for at in range(1, len(text)):
        assert read(form, [text[:at], text[at:]], **how) == expected, f"cut before {text[at:]!r}"


HERMES_CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CALL = ("f", '{"a": 1}')
EMPTY = ("f", "{}")

GOOD: list[tuple[Form, str, Told]] = [
    (HERMES, "", ("", [])),
    (HERMES, "plain <b>text</b> < <tool", ("plain <b>text</b> < <tool", [])),
    (HERMES, " spaces stay \n", (" spaces stay \n", [])),
    (HERMES, HERMES_CALL, ("", [CALL])),
    (HERMES, "\n\n" + HERMES_CALL + "\n", ("", [CALL])),
    (HERMES, "Let me see.\n" + HERMES_CALL, ("Let me see.", [CALL])),
    (HERMES, HERMES_CALL + "\n" + HERMES_CALL, ("", [CALL, CALL])),
    (HERMES, HERMES_CALL + "\nDone.", ("\nDone.", [CALL])),
    (HERMES, "a" + HERMES_CALL + " b " + HERMES_CALL + " c", ("a b c", [CALL, CALL])),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', ("", [CALL])),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', ("", [EMPTY])),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', ("", [EMPTY])),
    (HERMES, '<tool_call>{"name": "f", "arguments": ""}</tool_call>', ("", [EMPTY])),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [CALL])),
    (HERMES, '<tool_call>{"name": "f", "parameters": {"a": 1}, "id": [7, {"x": "}"}]}</tool_call>', ("", [CALL])),
    (HERMES, '<tool_call>{"type": "function", "name": "f", "arguments": {"a": 1}}</tool_call>', ("", [CALL])),
    (HERMES, '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "f"}]</tool_call>', ("", [CALL, EMPTY])),
    (HERMES, '<tool_call>{"name": "\\u0066", "arguments": {"a": 1}}</tool_call>', ("", [CALL])),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"t": "</tool_call> \\" } <tool_call>"}}</tool_call>',
        ("", [("f", '{"t": "</tool_call> \\" } <tool_call>"}')]),
    ),
    (HERMES, '{"name": "f", "arguments": {"a": 1}}\n', ("", [CALL])),
    (HERMES, '```json\n{\n  "name": "f",\n  "arguments": {"a": 1}\n}\n```', ("", [CALL])),
    (HERMES, '```json\n{"city": "Bern"}\n``` and ```x```', ('```json\n{"city": "Bern"}\n``` and ```x```', [])),
    (HERMES, 'So: {"name": "f", "arguments": {}}', ('So: {"name": "f", "arguments": {}}', [])),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}', ("", [CALL])),
    (LLAMA, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', ("", [CALL])),
    (LLAMA, ' {"name": "f", "parameters": {}}; {"name": "f", "parameters": {"a": 1}}', ("", [EMPTY, CALL])),
    (LLAMA, '{"name": "f", "parameters": {}} as asked', (" as asked", [EMPTY])),
    (LLAMA, '{"city": "Bern"}', ('{"city": "Bern"}', [])),
    (LLAMA, 'Use {"name": "f", "parameters": {}}', ('Use {"name": "f", "parameters": {}}', [])),
    (MISTRAL_LIST, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', ("", [CALL])),
    (MISTRAL_LIST, '[TOOL_CALLS] [{"name": "f"}, {"name": "f", "arguments": {"a": 1}}]', ("", [EMPTY, CALL])),
    (MISTRAL_LIST, 'Ok [TOOL_CALLS][{"name": "f"}] so', ("Ok so", [EMPTY])),
    (MISTRAL_LIST, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "123456789"}]', ("", [CALL])),
    (MISTRAL_NAMED, '[TOOL_CALLS]f[ARGS]{"a": 1}', ("", [CALL])),
    (MISTRAL_NAMED, '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]f[ARGS]{}', ("", [CALL, EMPTY])),
    (MISTRAL_NAMED, '[TOOL_CALLS]f[CALL_ID]123456789[ARGS] {"a": 1}', ("", [CALL])),
    (
        FUNCTION_GEMMA,
        '<start_function_call>call:get_weather{city:<escape>A "b", c}<escape>,days:3}<end_function_call>',
        ("", [("get_weather", '{"city":"A \\"b\\", c}","days":3}')]),
    ),
    (FUNCTION_GEMMA, "<start_function_call>call:f{}<end_function_call>", ("", [EMPTY])),
    (
        FUNCTION_GEMMA,
        "<start_function_call>call:f{a:1}<end_function_call><start_function_call>call:f{}<end_function_call>",
        ("", [("f", '{"a":1}'), EMPTY]),
    ),
    (
        GEMMA_4,
        '<|tool_call>call:f{a:[1,true,<|"|>x\ny<|"|>],b:{c:null,d:x y},e:"\\"q"}<tool_call|>ok',
        ("ok", [("f", '{"a":[1,true,"x\\ny"],"b":{"c":null,"d":"x y"},"e":"\\"q"}')]),
    ),
    (DESCRIBED_GEMMA, '{"name": "f", "parameters": {"a": 1}}', ("", [CALL])),
    (DESCRIBED_GEMMA, '```json\n{"name": "f", "parameters": {"a": 1}}\n```', ("", [CALL])),
    (DESCRIBED_GEMMA, '```tool_code\n[{"name": "f"}, {"name": "f"}]\n```\n', ("", [EMPTY, EMPTY])),
    (DESCRIBED_GEMMA, "```json\n{}\n```", ("```json\n{}\n```", [])),
    (DESCRIBED_GEMMA, "```python\nf()\n```", ("```python\nf()\n```", [])),
    (DESCRIBED_GEMMA, "See\n```json\n[1]\n```", ("See\n```json\n[1]\n```", [])),
]

BAD: list[tuple[Form, str, Told]] = [
    # no call yet: content, as it stands
    (HERMES, "<tool_call></tool_call>", ("<tool_call></tool_call>", [])),
    (HERMES, "<tool_call>{}</tool_call>", ("<tool_call>{}</tool_call>", [])),
    (
        HERMES,
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        ('<tool_call>{"name": "g", "arguments": {}}</tool_call>', []),
    ),
    (HERMES, '<tool_call>{"name": 5}</tool_call>', ('<tool_call>{"name": 5}</tool_call>', [])),
    (HERMES, "<tool_call>f(1)</tool_call>", ("<tool_call>f(1)</tool_call>", [])),
    (HERMES, '<tool_call>{"name": "f", "arguments": [1]}', ('<tool_call>{"name": "f", "arguments": [1]}', [])),
    (HERMES, '<tool_call>{"name": "f", "arguments": 42}', ('<tool_call>{"name": "f", "arguments": 42}', [])),
    (HERMES, '<tool_call>{"name": "f", "arguments": "x"}', ('<tool_call>{"name": "f", "arguments": "x"}', [])),
    (HERMES, '\n<tool_call>\n{"name": "f", "argum', ('\n<tool_call>\n{"name": "f", "argum', [])),
    (HERMES, "<tool_call><tool_call>" + HERMES_CALL, ("<tool_call><tool_call>", [CALL])),
    (HERMES, "`<tool_call>` is a tag; " + HERMES_CALL, ("`<tool_call>` is a tag;", [CALL])),
    (HERMES, "</tool_call> alone", ("</tool_call> alone", [])),
    # a call that lacks braces of its own
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>\n', ("", [CALL])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}\nBye', ("\nBye", [CALL])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>', ("", [CALL])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}} Bye', ("} Bye", [CALL])),
    # a call that was cut, or whose arguments are no JSON: as far as it came, as it came
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "x', ("", [("f", '{"a": "x')])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": [1}}</tool_call> b', (" b", [("f", '{"a": [1}}')])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {\'a\': 1}}</tool_call>', ("", [("f", "{'a': 1}}")])),
    (LLAMA, '{"name": "f", "parameters": {"a": [}} more', ("", [("f", '{"a": [}} more')])),
    (MISTRAL_NAMED, "[TOOL_CALLS]g[ARGS]{}", ("[TOOL_CALLS]g[ARGS]{}", [])),
    (MISTRAL_NAMED, "[TOOL_CALLS]f[ARGS][1]", ("", [("f", "[1]")])),
    (MISTRAL_NAMED, '[TOOL_CALLS]f[ARGS]{"a": ]}[TOOL_CALLS]f[ARGS]{}', ("", [("f", '{"a": ]}'), EMPTY])),
    (MISTRAL_LIST, "[TOOL_CALLS] none", ("[TOOL_CALLS] none", [])),
    (
        FUNCTION_GEMMA,
        "<start_function_call>call:g{}<end_function_call>",
        ("<start_function_call>call:g{}<end_function_call>", []),
    ),
    (FUNCTION_GEMMA, "<start_function_call>call:f{a:<escape>x", ("", [("f", '{"a":"x')])),
]


@pytest.mark.parametrize(("form", "text", "expected"), [*GOOD, *BAD])
def test_content_and_calls(form: Form, text: str, expected: Told) -> None:
    everywhere_cut(form, text, expected)


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [case for case in GOOD if case[0].begins and "</tool_call> \\" not in case[1]],  # it holds tags as text
)
def test_control_tokens_are_tags(form: Form, text: str, expected: Told) -> None:
    """Where the tags are control tokens they need not show in the text."""
    assert marked(form, text)[1] == expected[1]
    assert marked(form, text, shows=True) == expected


def test_what_hides_a_tag_hides_it_in_content() -> None:
    assert marked(MISTRAL_LIST, "[TOOL_CALLS] none") == (" none", [])
    assert marked(MISTRAL_LIST, "[TOOL_CALLS] none", shows=True) == ("[TOOL_CALLS] none", [])


def test_control_tokens_that_are_typed_out_are_text() -> None:
    for form, text, expected in GOOD:
        if expected[1] and text.startswith(tuple(form.begins)):
            assert read(form, text, controls=form.tags) == (text, [])


HELD_GOOD: list[tuple[str, Told]] = [
    ('{"name": "f", "arguments": {"a": 1}}\n', ("", [CALL])),
    ('\n {\r\n\t"name":"f","parameters":{"a": 1}}', ("", [CALL])),
    ('```json\n{"name": "f", "arguments": {"a": 1}}\n```\n', ("", [CALL])),
    ('```\n{"name": "f", "arguments": {"a": 1}}\n{"name": "f", "arguments": {}}\n```', ("", [CALL, EMPTY])),
    ('{"name": "f", "arguments": {"a": "x', ("", [("f", '{"a": "x')])),
    ('{"name": "f", "argum', ('{"name": "f", "argum', [])),
    ('```json\n{"name": "f"}\n```', ("", [EMPTY])),
    ('{"name": "f"', ('{"name": "f"', [])),
    ('{"name": "f", "id": 1, "arguments": {}}', ('{"name": "f", "id": 1, "arguments": {}}', [])),
    ('{"arguments": {"a": 1}, "name": "f"}', ('{"arguments": {"a": 1}, "name": "f"}', [])),
    ('{"name": "\\u0066", "arguments": {}}', ('{"name": "\\u0066", "arguments": {}}', [])),
    ('{"type": "function", "name": "f", "arguments": {}}', ('{"type": "function", "name": "f", "arguments": {}}', [])),
    ('```json\n[{"name": "f", "arguments": {}}]', ('```json\n[{"name": "f", "arguments": {}}]', [])),
    ('{"name": "<tool_', ('{"name": "<tool_', [])),
    ('{"name": ' + HERMES_CALL, ('{"name": ', [CALL])),
    ("```" + HERMES_CALL, ("```", [CALL])),
    (HERMES_CALL + '{"name": "f", "arguments": {}}', ('{"name": "f", "arguments": {}}', [CALL])),
]


@pytest.mark.parametrize(("text", "expected"), HELD_GOOD)
def test_where_a_grammar_holds_calls_they_lack_their_tags_only_as_it_has_them(text: str, expected: Told) -> None:
    everywhere_cut(HERMES, text, expected, held=True)


def test_a_call_without_its_tag_is_told_as_it_comes_and_text_as_soon_as_it_shows() -> None:
    reader = CallReader(HERMES, Calls(NAMES), held=True)
    assert reader.feed('{"name": "f", "arguments":') == []
    (first,) = reader.feed(' {"a"')
    assert isinstance(first, CallDelta)
    assert (first.name, first.arguments) == ("f", '{"a"')
    for text in ('{"c', '{"name": "x', '{"name": "f", "d', "```p", "```\n["):
        reader = CallReader(HERMES, Calls(NAMES), held=True)
        assert reader.feed(text[:-1]) == []
        assert reader.feed(text[-1]) == [text]


def test_calls_lack_no_tags_where_content_has_a_form() -> None:
    """It could not be told apart."""
    reader = CallReader(HERMES, Calls(NAMES), held=True, any_text=False)
    text = '{"name": "f", "arguments": {}}'
    assert told([*reader.feed(text), *reader.finish()]) == (text, [])


def test_a_tag_that_is_cut_is_no_content_where_there_must_be_calls() -> None:
    for text in (
        "<tool_",
        "\n<tool_call>",
        '<tool_call>\n{"na',
        HERMES_CALL + "\n\n<tool_",
        HERMES_CALL + "<tool_call>\n{",
    ):
        reader = CallReader(HERMES, Calls(NAMES), held=True, any_text=False)
        assert told([*reader.feed(text), *reader.finish()])[0] == ""
    reader = CallReader(HERMES, Calls(NAMES), held=True, any_text=False)
    cut = '<tool_call>{"name": "f", "arguments": {"a": "</tool_'
    assert told([*reader.feed(cut), *reader.finish()]) == ("", [("f", '{"a": "</tool_')]), "in the arguments it is text"
    reader = CallReader(HERMES, Calls(NAMES), held=True, any_text=False)
    assert told([*reader.feed('{"a": "<tool_'), *reader.finish()]) == ('{"a": "<tool_', []), (
        "content that was asked for"
    )


def test_at_most_one() -> None:
    text = HERMES_CALL + "\n" + HERMES_CALL
    assert read(HERMES, [text], most=1) == ("\n" + HERMES_CALL, [CALL])


def test_arguments_are_told_as_they_come() -> None:
    reader = reader_of(HERMES)
    assert reader.feed('<tool_call>{"name": "f", "arguments": ') == []
    (first,) = reader.feed('{"a"')
    assert isinstance(first, CallDelta)
    assert (first.name, first.arguments) == ("f", '{"a"')
    assert reader.feed(": 1") == [CallDelta(0, ": 1")]
    assert reader.feed("}") == [CallDelta(0, "}")]
    assert reader.feed("}</tool_call>") == []


def test_text_is_told_at_once() -> None:
    """Only what may begin a call waits."""
    reader = reader_of(HERMES)
    assert reader.feed("a") == ["a"]
    assert reader.feed("b <") == ["b"]
    assert reader.feed("t") == []
    assert reader.feed("r>") == [" <tr>"]
    assert reader.feed(" c") == [" c"]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_whether_a_call_is_open(form: Form) -> None:
    for text, expected in [(t, e) for f, t, e in GOOD if f is form]:
        reader = reader_of(form)
        reader.feed(text)
        reader.finish()
        assert reader.calls.count == len(expected[1])
        assert not reader.calls.is_open
    for text in [t for f, t, _ in BAD if f is form and t.endswith(("x", '"x'))]:
        reader = reader_of(form)
        reader.feed(text)
        reader.finish()
        assert reader.calls.is_open


# ---- properties

FRAGMENTS = st.sampled_from(
    [
        *'{}[]:,;`"\\ \nafx1<>|',
        *sorted({tag for form in FORMS for tag in form.tags}),
        '{"name": "f", "arguments": ',
        '{"name": "f", "parameters": ',
        '"name"',
        '"arguments"',
        '{"a": "b"}',
        "call:f{",
        "f",
        "```json\n",
        "</tool",
        "[TOOL_",
    ]
)
TEXTS = st.lists(FRAGMENTS, max_size=24).map("".join)


def cuts(text: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    edges = sorted({0, len(text), *(rng.randint(0, len(text)) for _ in range(rng.randint(0, 8)))})
    return [text[a:b] for a, b in pairwise(edges)] or [""]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@settings(max_examples=300, deadline=None)
@given(text=TEXTS, seed=st.integers(0, 2**32))
def test_cuts_change_nothing(form: Form, text: str, seed: int) -> None:
    for held in (False, True):
        whole = read(form, [text], held=held)
        assert read(form, cuts(text, seed), held=held) == whole
        assert read(form, text, held=held) == whole


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_nothing_is_lost_where_nothing_is_called(form: Form, text: str) -> None:
    assert read(form, [text], names=()) == (text, [])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(max_size=8), VALUES, max_size=4)
PROSE = st.text(alphabet="abc é\n.{", max_size=12).map(lambda text: f"x{text}y")


def written(form: Form, calls: list[tuple[str, Any]]) -> str:
    """As the family's template writes these calls."""
    objects = [json.dumps({"name": name, "arguments": given}, ensure_ascii=False) for name, given in calls]
    if form in (HERMES, DESCRIBED_HERMES):
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)
    if form is MISTRAL_LIST:
        return f"[TOOL_CALLS][{', '.join(objects)}]"
    if form is MISTRAL_NAMED:
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given)}" for name, given in calls)
    return "; ".join(text.replace('"arguments"', '"parameters"', 1) for text in objects)


@pytest.mark.parametrize("form", [HERMES, MISTRAL_LIST, MISTRAL_NAMED, LLAMA, DESCRIBED_GEMMA], ids=lambda f: f.name)
@settings(max_examples=150, deadline=None)
@given(calls=st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3), before=PROSE)
def test_calls_come_back_as_they_were_written(form: Form, calls: list[tuple[str, Any]], before: str) -> None:
    text = written(form, calls)
    content = "" if form in (LLAMA, DESCRIBED_GEMMA) else before
    got = read(form, content + text)
    assert got[0] == content
    assert [(name, json.loads(arguments)) for name, arguments in got[1]] == calls


def keyed(value: Any, quote: str) -> str:
    match value:
        case str():
            return quote + value + quote
        case dict():
            return "{" + ",".join(f"{k}:{keyed(v, quote)}" for k, v in value.items()) + "}"
        case list():
            return "[" + ",".join(keyed(v, quote) for v in value) + "]"
    return json.dumps(value)


KEYED_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"[a-z_]{1,5}", fullmatch=True), inner),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(given_=st.dictionaries(st.from_regex(r"[a-z_]{1,5}", fullmatch=True), KEYED_VALUES, max_size=4))
def test_gemmas_own_writing_becomes_json(given_: dict[str, Any]) -> None:
    for form, begin, end, quote in (
        (FUNCTION_GEMMA, "<start_function_call>", "<end_function_call>", "<escape>"),
        (GEMMA_4, "<|tool_call>", "<tool_call|>", '<|"|>'),
    ):
        text = f"{begin}call:f{keyed(given_, quote)}{end}"
        content, [(name, arguments)] = read(form, text)
        assert (content, name, json.loads(arguments)) == ("", "f", given_)


# ---- which form a template has

QWEN = (
    "{%- if tools %}# Tools\n<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>\nbetween "
    "<tool_call> and </tool_call>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
)
LLAMA_3 = (
    "{{ '<|start_header_id|>system<|end_header_id|>' }}{% if tools is not none %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ '{\"name\": \"' + m.x + '\", ' }}{{ '\"parameters\": ' }}{% endfor %}"
)
NEMO = "{% for tool in tools %}{% endfor %}{{ '[TOOL_CALLS][' }}"
SMALL_3 = "{{ '[AVAILABLE_TOOLS]' + tools | tojson }}{{ '[TOOL_CALLS]' + name }}{{ '[ARGS]' }}"
FUNCTION_GEMMA_T = "{% for tool in tools %}{% endfor %}<start_function_call>call:{{ name }}{<end_function_call>"
GEMMA_4_T = "{% if tools %}{% endif %}{{ '<|tool_call>call:' + f['name'] + '{' }}{{ '}<tool_call|>' }}"
XML = "{% if tools %}<tool_call>\n<function=name>\n<parameter=key>{% endif %}"
UNKNOWN = "{% if tools %}functools[{{ tools | tojson }}]{% endif %}"
GEMMA_3 = "{{ '<start_of_turn>' + role }}{# no tools are known here #}"


def small(template: str, **keys: str) -> Tokenizer:
    return Tokenizer.from_gguf(byte_level(chat_template=template, **keys))


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (QWEN, HERMES),
        (LLAMA_3, LLAMA),
        (NEMO, MISTRAL_LIST),
        (SMALL_3, MISTRAL_NAMED),
        (FUNCTION_GEMMA_T, FUNCTION_GEMMA),
        (GEMMA_4_T, GEMMA_4),
        (GEMMA_3, DESCRIBED_GEMMA),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", DESCRIBED_HERMES),
        (XML, None),
        (UNKNOWN, None),
    ],
)
def test_the_template_tells_the_form(template: str, form: Form | None) -> None:
    assert form_of(small(template)) is form


def test_a_template_for_tools_alone_tells_the_form() -> None:
    assert form_of(small(GEMMA_3, **{"chat_template.tool_use": QWEN})) is HERMES


@pytest.mark.parametrize(
    ("name", "form"),
    [("qwen2.5-coder-0.5b", HERMES), ("smollm2-135m", DESCRIBED_HERMES)],
)
def test_real_models(name: str, form: Form, real: Callable[[str], Tokenizer]) -> None:
    assert form_of(real(name)) is form
