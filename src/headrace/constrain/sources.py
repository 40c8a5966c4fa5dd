"""Brings every kind of grammar into the form that llguidance compiles. Pure functions of text."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from headrace.constrain import lark, schema
from headrace.constrain.guided import reason
from headrace.constrain.patterns import bounded
from headrace.errors import RequestError
from headrace.params import Grammar


def library_form(grammar: Grammar) -> str:
    """RequestError for "grammar" where it is malformed or too large; for a part of a schema by its path."""
    match grammar.kind:
        case "json":
            return schema_form(schema.judgement(parsed(grammar.source)).schema)
        case "regex":
            bounded(grammar.source, "grammar")
            return LLMatcher.grammar_from_regex(grammar.source)
        case "choice":
            return LLMatcher.grammar_from_lark(_choice(grammar.source))
        case "gbnf":
            return LLMatcher.grammar_from_lark(_gbnf(grammar.source))
    return LLMatcher.grammar_from_lark(grammar.source)


def schema_form(judged: dict[str, Any]) -> str:
    """Of a schema that was judged."""
    return LLMatcher.grammar_from_json_schema(schema.text_of(judged))


def parsed(source: str) -> Any:
    """RequestError for "grammar" where it is no JSON."""
    try:
        return json.loads(source, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"a grammar of this kind must be JSON: {error}", "grammar") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _choice(source: str) -> str:
    choices = parsed(source)
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise RequestError("a choice must be a list of strings that are not empty", "grammar")
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _gbnf(source: str) -> str:
    try:
        text = gbnf_to_lark(source)
    except Exception as error:  # whatever the library raises on a text that is no grammar
        raise RequestError(f"the gbnf grammar cannot be read: {reason(str(error))}", "grammar") from None
    lark.admit(text.removeprefix("%llguidance {}"), "grammar")
    return text
