"""Chat templates: what they find there, what they cannot do."""

from __future__ import annotations

import json
import time
from datetime import datetime

import pytest

from headrace.errors import RequestError
from headrace.tokenize import template
from headrace.tokenize.template import ChatTemplate, chat_template


def written(source: str, **variables: object) -> str:
    return ChatTemplate(source).render(variables)


def test_blocks_leave_no_lines_behind() -> None:
    assert written("{% if true %}\n  a\n  {% endif %}\nb\n") == "  a\nb"


def test_loop_controls() -> None:
    assert (
        written(
            "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}"
            "{{ i }}{% endfor %}"
        )
        == "02"
    )


def test_json() -> None:
    value = {"b": "é<>&'\"", "a": [1, None, True]}
    assert written("{{ x | tojson }}", x=value) == json.dumps(value, ensure_ascii=False)
    assert written("{{ x | tojson(indent=2) }}", x=value) == json.dumps(value, ensure_ascii=False, indent=2)
    assert written("{{ x | tojson(ensure_ascii=true, sort_keys=true, separators=(',', ':')) }}", x=value) == json.dumps(
        value, sort_keys=True, separators=(",", ":")
    )


def test_now() -> None:
    assert written("{{ strftime_now('%Y') }}") == str(datetime.now().year)


def test_the_generation_tag_marks_and_does_nothing() -> None:
    assert written("{% set x = 1 %}{% generation %}{% set x = 2 %}a{{ x }}{% endgeneration %}b{{ x }}") == "a2b1"


def test_namespaces_and_macros() -> None:
    source = (
        "{% set ns = namespace(n=0) %}{% macro m(x) %}<{{ x }}>{% endmacro %}"
        "{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{{ m(i) }}{% endfor %}{{ ns.n }}"
    )
    assert written(source) == "<1><2>3"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ x.y }}", "'x' is undefined"),
        ("{{ messages[0]['content'] + 1 }}", "no attribute 'content'"),
        ("{% for %}", "Expected"),
        ("{% nonsense %}", "nonsense"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'a' + 1 }}", "str"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ ''.__class__ }}{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|safely"),
        ("{% for i in range(1000000) %}{% endfor %}", "range"),
        ("{{ 'x' * 1000000000 }}", "too large"),
        ("{{ [1] * 1000000000 }}", "too large"),
        ("{{ 9 ** 9 ** 9 }}", "too large"),
        ("{% include 'x' %}", "loader"),
    ],
)
def test_what_a_template_cannot_do_is_the_users_error(source: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as error:
        written(source, messages=[{}])
    assert error.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
        "{% set r = range(90000) | list %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for a in range(90000) recursive %}{{ loop([1, 2, 3]) }}{% endfor %}",
    ],
)
def test_no_template_runs_for_ever(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "SECONDS", 0.2)
    start = time.perf_counter()
    with pytest.raises(RequestError, match=r"0\.2 s|recursion"):
        written(source)
    assert time.perf_counter() - start < 5


def test_no_template_writes_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "CHARACTERS", 1000)
    with pytest.raises(RequestError, match="1,000 characters"):
        written("{% for a in range(900) %}abc{% endfor %}")
    assert len(written("{% for a in range(300) %}abc{% endfor %}")) == 900


def test_compiled_once() -> None:
    assert chat_template("{{ a }}") is chat_template("{{ a }}")


@pytest.mark.parametrize(
    ("source", "takes"),
    [
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", False),
        ("{% for m in messages %}{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}", True),
        ("{% macro r(content) %}{% for part in content %}{% endfor %}{% endmacro %}", True),
        ("{% for m in messages %}{% for line in m.content.split('x') %}{% endfor %}{% endfor %}", False),
    ],
)
def test_whether_it_takes_parts(source: str, takes: bool) -> None:
    assert ChatTemplate(source).takes_parts is takes
