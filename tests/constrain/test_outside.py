"""What comes from outside is bounded: Lark text, what expressions count out, patterns of other dialects, sizes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from headrace.constrain.keywords import FORMATS
from headrace.constrain.lark import admit
from headrace.constrain.patterns import WEIGHT, PatternError, portable, weight
from headrace.constrain.schema import judged
from headrace.errors import RequestError
from headrace.serve.structured import form_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "weighs"),
    [
        ("abc", 3),
        ("a{10}", 10),
        ("(ab|c){3,7}", 21),
        ("((a{5}){5}){5}", 125),
        ("[a-z{3}]{4}", 4),
        (r"\{{3}", 3),
        (r"\p{L}{7}\x{41}", 8),
        ("[]a]{6}", 6),
        ("[[:alpha:]x&&[^y]]{9}", 9),
        ("(?:a*b+c?){2,}", 6),
        ("a{999999999999999}", 999999999),
        ("(((a{100}){100}){100}){100}", 100_000_000),
        ("((", 0),
        ("a){5}", 2),
        ("", 0),
    ],
)
def test_what_an_expression_counts_out(text: str, weighs: int) -> None:
    found = weight(text)
    assert found == weighs or (weighs < 10 and found <= 10)


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"^\d\w\s$", ["1a ", "0_\t"], ["١a ", "1é "]),
        (r"^\D\W\S$", ["a-é"], ["1-a", "aéa", "a- ", "a-\u0085", "a-\ufeff"]),
        (r"^[^\d]$", ["a"], ["1"]),
        (r"^[^\s]$", ["a"], [" ", "\u0085", "\ufeff"]),
        ("^.$", ["a", "é"], ["\n", "\u2028"]),
        ("^[a&&b~~cd-]$", ["a", "&", "~", "-", "c"], ["e"]),
        (r"^[\w-.]$", ["-", ".", "a"], ["/"]),
        (r"^[+--]$", ["+", ",", "-"], ["."]),
        ("^[[]$", ["["], ["]"]),
        (r"^\<\>$", ["<>"], ["", "\\<>"]),
        ("^a{x}{2}$", ["a{x}}"], ["axx"]),
        (r"^\u0041\x42$", ["AB"], ["ab"]),
    ],
)
def test_patterns_mean_what_all_engines_agree_on(pattern: str, right: list[str], wrong: list[str]) -> None:
    import regex

    ours = re.sub(r"\\x\{([0-9a-f]+)\}", lambda found: f"\\U{int(found[1], 16):08x}", portable(pattern))
    for text in right:
        assert regex.search(ours, text, regex.V1), (ours, text)
    for text in wrong:
        assert not regex.search(ours, text, regex.V1), (ours, text)


def test_possessive_and_others_are_refused() -> None:
    for pattern in ("a++", "(?#x)a", "(?>a)", r"\G", r"\p", r"\u00", "a{,2}", "[", "\\", "(?i:a)"):
        with pytest.raises(PatternError):
            portable(pattern)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('start: "a" b\nb: %json {"type": "object"}', "%json"),
        ("start: a\na: %lark { start: /x/ }", "%lark"),
        ("%llguidance {}\nstart: /a/", "%llguidance"),
        ('%llguidance { "no_forcing": true }\nstart: /a/', "%llguidance"),
        ("%import .other (A)\nstart: A", "%import"),
        ("%import file.A\nstart: A", "%import"),
        ('start: A\nA: %regex { "substring_chars": "abc" }', "%regex"),
        ("start: a\na[temperature=0.7]: /x+/", "temperature"),
        ("start: a\na[lazy, max_tokens=5]: /x+/", "max_tokens"),
        ('start: a b\na[stop="x"]: /y+/\nb: "x"', "stop"),
        ('start: a\na[stop_capture="x", suffix="b"]: /y+/', "stop_capture"),
        ("start: /(a{200}){200}/", "counts out"),
        ("start: a{200}\na: b{200}\nb: /x/", "counts out"),
        ("start: a\na: b{65}\nb: c{14}\nc: /a?b?c?d?e?/", "counts out"),
        ('start: A\nA: (B "x"){150}\nB: ("y" | C)~150\nC: "z"', "counts out"),
        ("start: " + '"x" ' * 30_000, "words"),
    ],
)
def test_lark_that_reaches_too_far_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(RequestError, match=re.escape(said)) as refused:
        form_of(None, {"grammar": text})
    assert refused.value.param == "structured_outputs.grammar"


@pytest.mark.parametrize(
    "text",
    [
        'start: "%json {}" /%lark/ // %llguidance\n# %json\n',
        "%import common.INT\n%ignore /[ ]+/\nstart: INT",
        'start: a\na[capture="stop", lazy]: /temperature/',
        'start: x{3}\nx: "a"{0,5} | x "b"',
        "start: a\na: b\nb: a | /x{900}/",
    ],
)
def test_other_lark_is_admitted(text: str) -> None:
    admit(text, "grammar")


def test_grammars_in_gbnf_are_bounded_too() -> None:
    from headrace.constrain.sources import library_form
    from headrace.params import Grammar

    with pytest.raises(RequestError, match="counts out"):
        library_form(Grammar("gbnf", 'root ::= a{300}\na ::= ("b"{300})'))
    with pytest.raises(RequestError, match="counts out"):
        library_form(Grammar("regex", f"(a{{{WEIGHT // 2}}}b){{3}}"))


def doubled(levels: int) -> Any:
    """Small as it is written, 2 ** levels large when it is written out."""
    defs: dict[str, Any] = {"d0": {"type": "null"}}
    for level in range(1, levels):
        again = {"$ref": f"#/$defs/d{level - 1}", "type": ["object", "null"]}
        defs[f"d{level}"] = {"type": "object", "properties": {"a": again, "b": again}}
    return {"$ref": f"#/$defs/d{levels - 1}", "$defs": defs}


PATTERNS = [{"type": "string", "pattern": f".*x.{{20}}{'.' * n}{n}"} for n in range(9)]


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (doubled(40), "over a billion"),
        ({"allOf": [{"anyOf": [{"required": [f"{n}"]} for n in range(60)]} for _ in range(3)]}, "written out"),
        ({"type": "object", "properties": {f"p{n}": {} for n in range(300)}, "minProperties": 1}, "written out"),
        ({"allOf": PATTERNS}, "patterns and formats"),
        ({"type": "array", "prefixItems": [{"maxItems": 4000}] * 5}, "together"),
        ({"type": "array", "prefixItems": [{"pattern": "a{9999}"}] * 3}, "patterns count out"),
        ({"enum": ["x" * 4000] * 17}, "characters together"),
    ],
)
def test_what_would_be_too_large_is_refused_before_it_is_compiled(schema: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        judged(schema)


def test_what_is_large_and_usual_is_not() -> None:
    judged(doubled(8))
    judged({"type": "object", "properties": {f"name{n}": {"type": "string", "maxLength": 200} for n in range(900)}})
    judged({"enum": [f"value {n}" for n in range(3000)]})
    judged({"allOf": PATTERNS[:8]})


def test_judged_text_is_for_lark() -> None:
    """As others in the house embed it: their own name for the place, the options of the library last."""
    text = judged({"type": "string", "title": "left out", "format": "ipv4"}, "tools[0].function.parameters")
    assert json.loads(text)["x-guidance"]["whitespace_pattern"] == r"[ \t\n\r]{1,8}"
    assert "title" not in text
    with pytest.raises(RequestError) as refused:
        judged({"properties": {"a": {"typ": 1}}}, "tools[0].function.parameters")
    assert refused.value.param == "tools[0].function.parameters.properties.a.typ"


def test_no_mutated_grammar_holds_anybody_up(smollm2: Path, tmp_path: Path) -> None:
    """`make fuzz-grammars` does tens of thousands."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.fuzz_grammars", str(smollm2), "--count", "1200", "--seed", "4"],
        cwd=ROOT,
        env={**os.environ, "HEADRACE_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"'driven': \d{3}", done.stdout)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        (
            "date",
            "2024-02-29 2000-02-29 1999-12-31 0004-02-29",
            "2023-02-30 1900-02-29 2023-04-31 0000-01-01 2023-02-29",
        ),
        ("time", "23:59:59Z 00:00:00.5+01:30 12:00:00-00:00", "24:00:00Z 12:00:60Z 12:00:00 12:60:00Z"),
        ("date-time", "2024-02-29T00:00:00Z", "2023-02-29T00:00:00Z 2024-02-28 2024-01-01T00:00:00"),
        ("duration", "P1D PT1H30M P1Y2M3DT4S P2W", "P PT P1 1D P1DT P1Y2D"),
        ("email", "a@b.de first.last+x@sub.example.org", "a@b @b.de a@ a..b@c.de a@b..de"),
        ("hostname", "example.org a-b.c1.info", "-a.org a-.org a..org org. 1.2"),
        ("ipv4", "0.0.0.0 255.10.99.1", "256.0.0.1 1.2.3 01.2.3.4 1.2.3.4.5"),
        (
            "ipv6",
            ":: ::1 1:2:3:4:5:6:7:8 fe80::1 1:2:3:4:5:6::",
            "1:2 ::1:2:3:4:5:6:7:8 1::2::3 12345::",
        ),
        ("uuid", "123e4567-e89b-12d3-a456-426614174000", "123e4567e89b12d3a456426614174000 123e4567-e89b-12d3-a456"),
        ("uri", "https://example.org/a?b=c#d x+y://a.bc:80", "example.org https:// https://a.org/%zz"),
    ],
)
def test_formats(name: str, right: str, wrong: str) -> None:
    """What each allows is right by another's judgement, too."""
    checks = Draft202012Validator({"format": name}, format_checker=Draft202012Validator.FORMAT_CHECKER)
    for text in right.split():
        assert re.search(FORMATS[name], text) and checks.is_valid(text), text
    for text in wrong.split():
        assert not re.search(FORMATS[name], text), text


def test_the_formats_are_all_tried() -> None:
    tried = {case[0] for mark in test_formats.pytestmark for case in mark.args[1]}  # type: ignore[attr-defined]
    assert tried == set(FORMATS)


def chain(links: int, **others: Any) -> Any:
    defs: dict[str, Any] = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}", **others} for n in range(links)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{links}": {"type": "null"}}}


def tangle(levels: int, key: str) -> Any:
    """Every level needs the one below it twice, in place."""
    defs: dict[str, Any] = {"d0": {"type": "null"}}
    defs |= {f"d{n}": {key: [{"$ref": f"#/$defs/d{n - 1}"}] * 2} for n in range(1, levels + 1)}
    return {"oneOf": [{"$ref": f"#/$defs/d{levels}"}, {"type": "string"}], "$defs": defs}


TWINS = {
    name: {
        "type": "object",
        "properties": {f"p{n}": {"$ref": f"#/$defs/{name}"} for n in range(40)},
        "required": ["p1"],
    }
    for name in "ab"
}


@pytest.mark.parametrize(
    "schema",
    [
        *(chain(1900), chain(1900, type="null"), tangle(40, "anyOf"), tangle(40, "allOf")),
        {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": TWINS},
        {"oneOf": [{"enum": list(range(60 * n, 60 * n + 60))} for n in range(60)]},
    ],
)
def test_the_judge_is_quick_itself(schema: Any) -> None:
    began = time.process_time()
    with contextlib.suppress(RequestError):
        judged(schema)
    assert time.process_time() - began < 2
