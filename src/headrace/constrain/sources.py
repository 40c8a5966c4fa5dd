"""Brings every kind of grammar into the form that llguidance compiles. Pure functions of text."""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from headrace.constrain.guided import reason
from headrace.errors import RequestError
from headrace.params import Grammar

BLANKS = r"[ \t\n\r]{1,8}"
"""Blanks between the parts of a JSON document: more are never needed, and small models write nothing else for ever."""


def library_form(grammar: Grammar) -> str:
    """RequestError for "grammar" where it is malformed."""
    match grammar.kind:
        case "json":
            return _json(grammar.source)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        case "choice":
            return LLMatcher.grammar_from_lark(_choice(grammar.source))
        case "gbnf":
            return LLMatcher.grammar_from_lark(_gbnf(grammar.source))
    return LLMatcher.grammar_from_lark(grammar.source)


def _json(source: str) -> str:
    schema = _parsed(source)
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise RequestError("a JSON schema must be an object, or true or false", "grammar")
    options = {"whitespace_flexible": True, "whitespace_pattern": BLANKS}
    return LLMatcher.grammar_from_json_schema({**schema, "x-guidance": options})


def _choice(source: str) -> str:
    choices = _parsed(source)
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise RequestError("a choice must be a list of strings that are not empty", "grammar")
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _gbnf(source: str) -> str:
    try:
        return gbnf_to_lark(source)
    except Exception as error:  # whatever the library raises on a text that is no grammar
        raise RequestError(f"the gbnf grammar cannot be read: {reason(str(error))}", "grammar") from None


def _parsed(source: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"a grammar of this kind must be JSON: {error}", "grammar") from None
