"""Grammars of calls: what they take, what they refuse, and that a reader of the same form finds the calls in it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import llguidance
import pytest

from headrace.constrain.guided import library_tokenizer
from headrace.errors import RequestError
from headrace.tokenize.tokenizer import Tokenizer
from headrace.tokenize.tools.calls import Calls
from headrace.tokenize.tools.form import Form, Spelling, Tool, Wanted
from headrace.tokenize.tools.gemma import DESCRIBED_GEMMA, FUNCTION_GEMMA, GEMMA_4
from headrace.tokenize.tools.hermes import HERMES
from headrace.tokenize.tools.llama import LLAMA
from headrace.tokenize.tools.mistral import MISTRAL_LIST, MISTRAL_NAMED
from headrace.tokenize.tools.reader import CallReader
from tests.tokenize.made import byte_level
from tests.tokenize.test_tools import told

FORMS = (HERMES, LLAMA, MISTRAL_LIST, MISTRAL_NAMED, FUNCTION_GEMMA, GEMMA_4, DESCRIBED_GEMMA)
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
WEATHER = Tool("w", CITY)
PING = Tool("ping", {"type": "object", "properties": {}})
END = 256


class Judge:
    """What llguidance says of texts over a vocabulary of bytes and the form's tags."""

    def __init__(self, form: Form, *, control: bool) -> None:
        tags = sorted(form.tags - {"```"})
        self.ids = {tag: END + 1 + i for i, tag in enumerate(tags)}
        self.spelling = Spelling(self.ids if control else {})
        types = [*([1] * END), 3, *([3 if control else 4] * len(tags))]
        tokenizer = Tokenizer.from_gguf(byte_level(controls=("<|end|>", *tags), ggml__token_type=types))
        assert tokenizer.special_ids == {END, *(self.ids.values() if control else ())}
        self._tokenizer = library_tokenizer(tokenizer, tokenizer.vocab_size, {END})

    def takes(self, grammar: str, text: str) -> bool:
        """May the answer be this text, tags by their tokens, and end there?"""
        source = llguidance.LLMatcher.grammar_from_lark(grammar)
        matcher = llguidance.LLMatcher(self._tokenizer, source)
        assert not matcher.is_error(), matcher.get_error()
        tokens = self._tokens(text)
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())

    def walk(self, grammar: str, rng: random.Random, start: str, fragments: Sequence[str], most: int) -> list[int]:
        """Tokens of a start and of fragments drawn at random, each where it may stand."""
        matcher = llguidance.LLMatcher(self._tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar))
        out = self._tokens(start)
        assert matcher.consume_tokens(out)
        for _ in range(most * 20):
            tokens = self._tokens(rng.choice(fragments))
            if matcher.validate_tokens(tokens) == len(tokens):
                assert matcher.consume_tokens(tokens)
                out += tokens
                most -= 1
            if not most or matcher.is_stopped():
                break
        return out

    def read(self, reader: CallReader, token: int) -> Sequence[Any]:
        """What a reader tells of one token of these."""
        tag = next((tag for tag, one in self.ids.items() if one == token), "")
        if tag and self.spelling.ids:
            return reader.mark(tag)
        return reader.feed(tag or chr(token))

    def _tokens(self, text: str) -> list[int]:
        out: list[int] = []
        while text:
            tag = next((tag for tag in self.ids if text.startswith(tag)), "")
            out += [self.ids[tag]] if tag else text[0].encode()
            text = text[len(tag) or 1 :]
        return out


def call(form: Form, name: str, given: dict[str, Any]) -> str:
    """One call as the form's grammar wants it."""
    arguments = json.dumps(given, ensure_ascii=False)
    if form is HERMES:
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    if form is MISTRAL_LIST:
        return f'{{"name": "{name}", "arguments": {arguments}}}'
    if form is MISTRAL_NAMED:
        return f"[TOOL_CALLS]{name}[ARGS]{arguments}"
    if form in (FUNCTION_GEMMA, GEMMA_4):
        begin, end, quote = ("<start_function_call>", "<end_function_call>", "<escape>")
        if form is GEMMA_4:
            begin, end, quote = ("<|tool_call>", "<tool_call|>", '<|"|>')
        pairs = [f"{k}:{quote + v + quote if isinstance(v, str) else json.dumps(v)}" for k, v in sorted(given.items())]
        return f"{begin}call:{name}{{{','.join(pairs)}}}{end}"
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def answer(form: Form, *calls: str) -> str:
    return f"[TOOL_CALLS][{', '.join(calls)}]" if form is MISTRAL_LIST else "".join(calls)


def grammar(form: Form, judge: Judge, *tools: Tool, required: bool = True, several: bool = True) -> str:
    return form.grammar(tools, Wanted(required, several), judge.spelling)


@pytest.fixture(params=[True, False], ids=["control tokens", "text"])
def control(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_required(form: Form, control: bool) -> None:
    judge = Judge(form, control=control)
    source = grammar(form, judge, WEATHER, PING)
    weather, ping = call(form, "w", {"city": "Bern é"}), call(form, "ping", {})
    more = call(form, "w", {"city": "B", "days": -3})
    for one in (weather, ping, more):
        assert judge.takes(source, answer(form, one))
        assert judge.takes(source, "\n\n" + answer(form, one)), "as it comes behind thinking"
    assert judge.takes(source, answer(form, weather, ping, more)) != form.single
    for bad in (
        "",
        "Hello",
        answer(form, weather)[:-1],
        answer(form, weather) + " x",
        "x " + answer(form, weather),
        answer(form, call(form, "rm", {})),
        answer(form, call(form, "w", {})),
        answer(form, call(form, "w", {"city": 5})),
        answer(form, call(form, "w", {"city": "B", "days": "3"})),
        answer(form, call(form, "w", {"city": "B", "sun": True})),
        answer(form, call(form, "ping", {"a": 1})),
        answer(form, weather.replace('": "Bern', '":  "Bern').replace(":<", ": <")),  # no room for endless blanks
    ):
        assert bad == answer(form, weather) or not judge.takes(source, bad), bad


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_what_is_taken_is_read(form: Form, control: bool) -> None:
    judge = Judge(form, control=control)
    source = grammar(form, judge, WEATHER, PING)
    text = answer(form, call(form, "w", {"city": 'B {"x"}'}))
    assert judge.takes(source, text)
    content, calls = told(_events(form, text))
    assert content == ""
    assert [name for name, _ in calls] == ["w"]
    assert json.loads(calls[0][1])["city"].startswith("B")


def _events(form: Form, text: str) -> Sequence[Any]:
    reader = CallReader(form, Calls(("w", "ping"), None, form.new_id))
    return [*reader.feed(text), *reader.finish()]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_at_most_one(form: Form, control: bool) -> None:
    judge = Judge(form, control=control)
    ping = call(form, "ping", {})
    for required in (True, False):
        source = grammar(form, judge, PING, required=required, several=False)
        assert judge.takes(source, answer(form, ping))
        for text in (answer(form, ping, ping), answer(form, ping) + "\n" + answer(form, ping)):
            assert not judge.takes(source, text)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_strict_where_nothing_is_required(form: Form, control: bool) -> None:
    judge = Judge(form, control=control)
    source = grammar(form, judge, Tool("w", CITY, strict=True), PING, required=False)
    for good in (
        "",
        "Hello é\n\n`x` < <b> [1]",
        answer(form, call(form, "w", {"city": "B"})),
        answer(form, call(form, "ping", {"a": 1})),
    ):
        assert judge.takes(source, good), good
    for bad in (
        answer(form, call(form, "w", {})),
        answer(form, call(form, "rm", {})),
        answer(form, call(form, "w", {"city": "B"}))[:-1],
    ):
        assert not judge.takes(source, bad), bad
    if form.firsts:
        assert not judge.takes(source, "\t" + answer(form, call(form, "w", {}))), "it would be read as a call"
        assert judge.takes(source, "\tHello {")
    if form.begins and not form.firsts:
        assert judge.takes(source, "I look.\n" + answer(form, call(form, "w", {"city": "B"})))
        assert not judge.takes(source, "I look.\n" + answer(form, call(form, "w", {})))


@pytest.mark.parametrize("form", [form for form in FORMS if not form.firsts], ids=lambda form: form.name)
def test_content_of_a_form_beside_calls(form: Form, control: bool) -> None:
    judge = Judge(form, control=control)
    schema = '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}'
    source = form.grammar([WEATHER], Wanted(content=f"%json {schema}"), judge.spelling)
    for good in ('{"name": "w"}', answer(form, call(form, "w", {"city": "B"}))):
        assert judge.takes(source, good)
    for bad in (
        "",
        "Hello",
        '{"city": "B"}',
        answer(form, call(form, "rm", {})),
        "x" + answer(form, call(form, "w", {})),
    ):
        assert not judge.takes(source, bad)


def test_names_and_schemas_with_quotes() -> None:
    judge = Judge(HERMES, control=False)
    key = 'a"\\é'
    tool = Tool("w", {"type": "object", "properties": {key: {"const": "</x>"}}, "required": [key]})
    source = grammar(HERMES, judge, tool)
    assert judge.takes(source, call(HERMES, "w", {key: "</x>"}))


def test_g1_tools_beside_each_other() -> None:
    """One tool's schema does not spoil the others'."""

    def tool(name: str, key: str, schema: dict[str, Any], **others: Any) -> Tool:
        return Tool(name, {"type": "object", "properties": {key: schema}, "required": [key], **others})

    low = {"type": "object", "properties": {"t": {"type": "string", "pattern": "^[a-z]+$"}}, "required": ["t"]}
    tools = [
        PING,
        tool("long", "t", {"type": "string", "maxLength": 8192}),
        tool("any", "t", {"type": "string", "pattern": "\\S"}),
        tool("low", "o", low),
        tool("ref", "n", {"$ref": "#/$defs/n"}, **{"$defs": {"n": {"type": "integer"}}}),
    ]
    judge = Judge(HERMES, control=False)
    source = grammar(HERMES, judge, *tools)
    for name, good, bad in (
        ("ping", {}, {"a": 1}),
        ("long", {"t": "x" * 8192}, {"t": "x" * 8193}),
        ("any", {"t": " a "}, {"t": "  "}),
        ("low", {"o": {"t": "abc"}}, {"o": {"t": "abC"}}),
        ("ref", {"n": 5}, {"n": "5"}),
    ):
        assert judge.takes(source, call(HERMES, name, good)), name
        assert not judge.takes(source, call(HERMES, name, bad)), name


def test_objects_that_speak_of_more_than_properties_stay_open() -> None:
    judge = Judge(HERMES, control=False)
    source = grammar(HERMES, judge, Tool("w", {"type": "object"}), Tool("p", {**CITY, "additionalProperties": True}))
    assert judge.takes(source, call(HERMES, "w", {"x": [1]}))
    assert judge.takes(source, call(HERMES, "p", {"city": "B", "x": 1}))


# ---- Gemma's own writing

KEYED = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
        "b": {"type": "boolean"},
        "e": {"enum": ["x", 1, True, None, 2.5], "type": ["string", "integer", "boolean", "null"]},
        "n": {"type": ["number", "null"]},
        "o": {"type": "object", "properties": {"k": {"type": "string"}}},
        "u": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    },
    "required": ["b"],
}


@pytest.mark.parametrize(
    ("arguments", "good"),
    [
        ("b:true", True),
        ("a:[1,-2],b:false", True),
        ("b:true,e:<escape>x<escape>,n:1.5e3,o:{k:<escape>y, {<escape>},u:7", True),
        ("b:true,e:1,n:null,o:{}", True),
        ("b:true,e:true,u:<escape><escape>", True),
        ("", False),
        ("a:[1]", False),
        ("a:[],b:true", False),
        ("a:[1,2,3],b:true", False),
        ("b:true,e:2", False),
        ("b:true,e:2.5", False),
        ("b:true,e:y", False),
        ("b:1", False),
        ("b:true,x:1", False),
        ("b:true,n:<escape>x<escape>", False),
        ("b:true,", False),
        ("e:1,b:true", False),
    ],
)
def test_schemas_in_gemmas_own_writing(arguments: str, good: bool, control: bool) -> None:
    judge = Judge(FUNCTION_GEMMA, control=control)
    source = grammar(FUNCTION_GEMMA, judge, Tool("f", KEYED))
    text = f"<start_function_call>call:f{{{arguments}}}<end_function_call>"
    assert judge.takes(source, text) is good
    if good:
        reader = CallReader(FUNCTION_GEMMA, Calls(("f",)))
        _, [(_, written)] = told([*reader.feed(text), *reader.finish()])
        assert json.loads(written)["b"] in (True, False)


@pytest.mark.parametrize(
    ("schema", "at"),
    [
        ({"pattern": "^a"}, "tools.function.parameters.properties.p.pattern"),
        ({"format": "date"}, "tools.function.parameters.properties.p.format"),
        ({"type": "integer", "minimum": 1}, "tools.function.parameters.properties.p.minimum"),
        ({"type": "strnig"}, "tools.function.parameters.properties.p.type"),
        ({"type": "array", "items": {"type": "object", "oneOf": [{"$ref": "#"}]}}, "tools.function.parameters"),
        ({"enum": [[1]]}, "tools.function.parameters.properties.p.enum"),
        ({"enum": 5}, "tools.function.parameters.properties.p.enum"),
        ({"enum": [1]}, "tools.function.parameters.properties.p.enum"),
        ({"const": "x", "maxLength": 1}, "tools.function.parameters.properties.p.maxLength"),
        ({"anyOf": [{"type": "string"}]}, "tools.function.parameters.properties.p.type"),
        ({"enum": []}, "tools.function.parameters.properties.p.enum"),
        ({"type": "array", "items": {"anyOf": {}}}, "tools.function.parameters.properties.p.items.anyOf"),
        ({"type": "array", "items": {"anyOf": [5]}}, "tools.function.parameters.properties.p.items.anyOf[0]"),
        ({"type": ["string", "strnig"]}, "tools.function.parameters.properties.p.type"),
        ({"type": ["string", "integer"], "minItems": 1}, "tools.function.parameters.properties.p.minItems"),
        ({"type": []}, "tools.function.parameters.properties.p.type"),
        ({"maxLength": "5"}, "tools.function.parameters.properties.p.maxLength"),
        ({"minLength": 6, "maxLength": 5}, "tools.function.parameters.properties.p.minLength"),
        ({"type": "array", "minItems": -1}, "tools.function.parameters.properties.p.minItems"),
        ({"type": "object", "properties": []}, "tools.function.parameters.properties.p"),
        ({"type": "object", "properties": {"a b": {}}}, "tools.function.parameters.properties.p.properties"),
    ],
)
def test_what_gemmas_own_writing_cannot_hold_is_named(schema: dict[str, Any], at: str) -> None:
    parameters = {"type": "object", "properties": {"p": {"type": "string", **schema}}}
    with pytest.raises(RequestError) as refused:
        FUNCTION_GEMMA.grammar([Tool("f", parameters)], Wanted(required=True), Spelling({}))
    assert refused.value.param is not None
    assert refused.value.param.startswith(at)


# ---- calls without their tags, where nothing is required

BARE = '{"name": "w", "arguments": {"city": "B"}}'
FENCED = f"```json\n{BARE}\n```"
STRICT = Tool("w", CITY, strict=True)


def held(text: str, *, most: int | None = None) -> tuple[str, list[tuple[str, str]]]:
    """What an answer that the grammar holds is told as."""
    reader = CallReader(HERMES, Calls(("w", "ping"), most), held=True)
    return told([*reader.feed(text), *reader.finish()])


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (BARE, [("w", '{"city": "B"}')]),
        (f"\r\n\t {BARE}", [("w", '{"city": "B"}')]),
        (f"{BARE}\n", [("w", '{"city": "B"}')]),
        ('{"name": "ping", "arguments": {"a": 1}}', [("ping", '{"a": 1}')]),
        ('{"name":"w","parameters":{"city": "B"}}', [("w", '{"city": "B"}')]),
        ('{\n  "name" : "w",\n\n  "arguments":\n  {"city": "B", "days": 3}\n}', [("w", '{"city": "B", "days": 3}')]),
        (f"{BARE}\n{BARE}", [("w", '{"city": "B"}')] * 2),
        (FENCED, [("w", '{"city": "B"}')]),
        ('{"name": "ping"}', [("ping", "{}")]),
        ('```\n{ "name" : "ping"\n}\n```', [("ping", "{}")]),
        (f'{{"name": "ping"}}{BARE}', [("ping", "{}"), ("w", '{"city": "B"}')]),
        (f"\n```\n{BARE}\n{BARE}```", [("w", '{"city": "B"}')] * 2),
        ('```tool_call\n\n{"name": "w", "arguments": {"city": "```"}}\n```', [("w", '{"city": "```"}')]),
    ],
)
def test_calls_without_tags_are_held_and_read(text: str, calls: list[tuple[str, str]], control: bool) -> None:
    judge = Judge(HERMES, control=control)
    source = grammar(HERMES, judge, STRICT, PING, required=False)
    assert judge.takes(source, text)
    assert held(text) == ("", calls)
    one = grammar(HERMES, judge, STRICT, PING, required=False, several=False)
    assert judge.takes(one, text) is (len(calls) == 1)


def test_arguments_that_may_not_be_empty_are_not_left_out() -> None:
    judge = Judge(HERMES, control=False)
    for schema, may in (({}, True), (CITY, False), ({"$ref": "#/$defs/c", "$defs": {"c": CITY}}, False)):
        source = grammar(HERMES, judge, Tool("w", schema, strict=True), required=False)
        assert judge.takes(source, '{"name": "w"}') is may
        assert judge.takes(source, BARE)


def test_tags_in_the_arguments_of_a_call_without_tags() -> None:
    judge = Judge(HERMES, control=False)
    text = '{"name": "w", "arguments": {"city": "``` <tool_call> \\" {"}}'
    assert judge.takes(grammar(HERMES, judge, STRICT, required=False), text)
    assert held(text) == ("", [("w", text[27:-1])])


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "w", "arguments": ',
        '{"name": "w"}',
        '{"name": "ping"} so',
        '{"name": "w", "arguments": {}}',
        '{"name": "w", "arguments": {"city": 5}}',
        '{"name": "w", "arguments": {"city": "B", "sun": true}}',
        '{"name": "w", "parameters": {}}',
        '{"name": "w", "arguments": null}',
        '{"name": "w", "arguments": "{\\"city\\": \\"B\\"}"}',
        '{"name": "ping", "arguments": []}',
        '\t{"name"\n:"w" ,\r"arguments" :{}}',
        f"{BARE} so",
        f"{BARE} {FENCED}",
        f'{BARE}\n{{"name": "w", "arguments": {{}}}}',
        f'{BARE}\n{{"name": "rm", "arguments": {{}}}}',
        f"{BARE}\n{call(HERMES, 'w', {'city': 'B'})}",
        f'{BARE[:-1]}, "arguments": {{}}}}',
        f'{BARE[:-1]}, "id": 5}}',
        FENCED[:-3],
        f"{FENCED} so",
        '```\n{"name": "w", "arguments": {}}\n```',
        '{"name": "w", "arguments": <tool_call>\n' + BARE + "\n</tool_call>",
    ],
)
def test_what_opens_as_a_call_must_be_one(text: str, control: bool) -> None:
    judge = Judge(HERMES, control=control)
    assert not judge.takes(grammar(HERMES, judge, STRICT, PING, required=False), text)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"name": "w", "arg',
        '{"name": "wx", "arguments": {}}',
        '{"name": "rm", "arguments": {"city": "B"}}',
        '{"name": "w", "description": "d", "parameters": {"type": "object"}}',
        '{"arguments": {}, "name": "w"}',
        '{"type": "function", "name": "w", "arguments": {}}',
        '{"id": 1, "name": "w", "arguments": {}}',
        '{"n\\u0061me": "w", "arguments": {}}',
        '{"name": "\\u0077", "arguments": {}}',
        '{"name": "w", "\\u0061rguments": {}}',
        '{"city": "Bern"}\n{"name": "w", "arguments": {}}',
        '[{"name": "w", "arguments": {}}]',
        'So: {"name": "w", "arguments": {}}',
        '``{"name": "w", "arguments": {}}',
        '```json\n{"city": "Bern"}\n```\nand ```x```',
        '```json\n[{"name": "w", "arguments": {}}]\n```',
        '```python\n{"name": "w", "arguments": {}}\n```',
        '```json {"name": "w", "arguments": {}}\n```',
        '\x0b{"name": "w", "arguments": {}}',
    ],
)
def test_what_opens_otherwise_is_free_and_no_call(text: str, control: bool) -> None:
    judge = Judge(HERMES, control=control)
    source = grammar(HERMES, judge, STRICT, PING, required=False)
    assert judge.takes(source, text)
    assert held(text) == (text, [])
    one = f"{text} {call(HERMES, 'w', {'city': 'B'})}"
    assert judge.takes(source, one), "calls in tags may follow"
    assert not judge.takes(source, f"{text} {call(HERMES, 'w', {})}"), "held as ever"
    assert held(one)[1] == [("w", '{"city": "B"}')]


STARTS = (
    "",
    '{"name": ',
    '{"name": "w", "arguments": ',
    "```json\n",
    '```\n{"name": "ping", "parameters":',
    "<tool_call>\n",
)
FRAGMENTS = (
    *'{}[]:,"` \n\t\\',
    *("w", "ping", "name", '"name"', '"arguments"', '"parameters"', '{"name": "w", "arguments": ', "json\n", "```"),
    *(
        '"city": "B"',
        '{"city": "',
        ', "days": ',
        "7",
        "</tool_call>",
        "<tool_call>",
        "<tool_call>\n",
        '{"a": ',
        "x",
        "é",
    ),
)


@pytest.mark.parametrize("several", [True, False], ids=["several", "one"])
def test_no_walk_leads_to_a_call_that_is_not_valid(control: bool, several: bool) -> None:
    """A model that writes at random what the grammar lets it: each call that is told and whole satisfies its schema,
    wherever the answer is cut."""
    judge = Judge(HERMES, control=control)
    source = grammar(HERMES, judge, STRICT, Tool("ping", PING.parameters, strict=True), required=False, several=several)
    rng = random.Random(5)
    seen = {"calls": 0, "texts": 0}
    for _ in range(150):
        tokens = judge.walk(source, rng, rng.choice(STARTS), FRAGMENTS, 30)
        reader = CallReader(HERMES, Calls(("w", "ping"), None if several else 1), judge.spelling.ids, held=True)
        content, calls = told([event for token in tokens for event in judge.read(reader, token)] + reader.finish())
        seen["calls"] += len(calls)
        seen["texts"] += bool(content)
        for name, arguments in calls[:-1] if reader.calls.is_open else calls:
            given = json.loads(arguments)
            assert given == {} if name == "ping" else isinstance(given["city"], str), tokens
            assert given.keys() <= {"city", "days"} and type(given.get("days", 0)) is int
    assert min(seen.values()) > 20, seen
