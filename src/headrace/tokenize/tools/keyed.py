"""Grammars of `call:name{key:value}`, Gemma's own way to write arguments: JSON schemas turned into rules.

Only what can be held is taken; any other keyword is refused by name, for an answer must not look as if it had been held
to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import RequestError
from headrace.tokenize.tools import lark
from headrace.tokenize.tools.form import Spelling, Tool, Wanted, quoted

_NOTES = frozenset({"title", "description", "default", "examples", "$comment", "deprecated", "$schema", "$id"})
_KNOWN: Mapping[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength"}),
    "integer": frozenset(),
    "number": frozenset(),
    "boolean": frozenset(),
    "null": frozenset(),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
"""Types, and the keywords that are held with each."""
_MOST = 65536
"""Largest bound of a length."""
_BARE_KEY = re.compile(r"[\w.-]+")

_TERMINALS = r"""
INTEGER: /-?(0|[1-9][0-9]{0,18})/
NUMBER: /-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,3})?/
KEY: /[A-Za-z_][A-Za-z0-9_]*/
pairs: "{" (KEY ":" any ("," KEY ":" any)*)? "}"
any: string | NUMBER | "true" | "false" | "null" | "[" (any ("," any)*)? "]" | pairs"""


def keyed_grammar(tools: Sequence[Tool], wanted: Wanted, spelling: Spelling, begin: str, end: str, quote: str) -> str:
    """RequestError names the schema's place that cannot be held."""
    rules = _Rules(quote, spelling)
    calls = []
    for tool in tools:
        held = wanted.required or tool.strict
        body = rules.value(lark.closed(tool.parameters), f"{tool.at}.function.parameters") if held else "pairs"
        calls.append(f"{quoted(f'call:{tool.name}')} {body} {spelling(end)}")
    return lark.grammar(calls, [*rules.lines, rules.string_rule(), *_TERMINALS.splitlines()], wanted, begin, spelling)


class _Rules:
    """Rules made so far."""

    def __init__(self, tag: str, spelling: Spelling) -> None:
        """`tag` stands around strings."""
        self.lines: list[str] = []
        self._tag = tag
        self._quote = spelling(tag)
        self._is_text = spelling.is_text(tag)

    def string_rule(self) -> str:
        if self._is_text:
            return f"string: {self._quote} rest\nrest[lazy]: /(.|\\n)*{re.escape(self._tag)}/"
        return f"string: {self._quote} /(.|\\n)*/ {self._quote}"

    def value(self, schema: Any, at: str) -> str:
        """What stands for a value of this schema, to be used in other rules."""
        if schema is True or schema == {}:
            return "any"
        if not isinstance(schema, Mapping):
            raise _refused(at, "is no schema that an answer can be held to")
        for key in ("const", "enum"):
            if key in schema:
                _only(schema, {key, "type"}, at)
                values = [schema[key]] if key == "const" else _list(schema, key, at)
                return self._literals([v for v in values if _is_of(v, schema.get("type"))], f"{at}.{key}")
        if "anyOf" in schema:
            _only(schema, {"anyOf"}, at)
            each = [self.value(one, f"{at}.anyOf[{i}]") for i, one in enumerate(_list(schema, "anyOf", at))]
            return self._named(" | ".join(each))
        kinds = schema.get("type")
        if isinstance(kinds, list):
            each = [self._typed(kind, schema, at) for kind in _list(schema, "type", at)]
            return self._named(" | ".join(each))
        return self._typed(kinds, schema, at)

    def _typed(self, kind: Any, schema: Mapping[str, Any], at: str) -> str:
        if not isinstance(kind, str) or kind not in _KNOWN:
            raise _refused(f"{at}.type", f"must be one of {', '.join(_KNOWN)}")
        kinds = schema["type"] if isinstance(schema["type"], list) else [kind]
        known = frozenset[str]().union(*(_KNOWN.get(str(one), frozenset()) for one in kinds))
        _only(schema, known | {"type"}, at)
        match kind:
            case "string":
                return self._string(schema, at)
            case "boolean":
                return '("true" | "false")'
            case "null":
                return '"null"'
            case "array":
                return self._array(schema, at)
            case "object":
                return self._object(schema, at)
        return kind.upper()

    def _string(self, schema: Mapping[str, Any], at: str) -> str:
        low, high = _bounds(schema, "minLength", "maxLength", at)
        if not low and high is None:
            return "string"
        most = "" if high is None else high
        return self._named(f"{self._quote} /[^<\\n]{{{low},{most}}}/ {self._quote}")

    def _array(self, schema: Mapping[str, Any], at: str) -> str:
        item = self.value(schema.get("items", {}), f"{at}.items")
        low, high = _bounds(schema, "minItems", "maxItems", at)
        if high == 0:
            return '"[" "]"'
        most = "" if high is None else high - 1
        more = f'("," {item}){{{max(low - 1, 0)},{most}}}'
        return self._named(f'"[" {item} {more} "]"' if low else f'"[" ({item} {more})? "]"')

    def _object(self, schema: Mapping[str, Any], at: str) -> str:
        """Its properties in the order of their names, as the templates write them."""
        properties, required = schema.get("properties"), schema.get("required", [])
        if properties is None:
            return "pairs"
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise _refused(at, "must have an object as properties and a list as required")
        after_none = after_some = self._named('""')
        for name in sorted(properties, reverse=True):
            if not _BARE_KEY.fullmatch(name):
                raise _refused(f"{at}.properties", f"has the name {name!r}, which cannot stand without quotes")
            pair = f"{quoted(f'{name}:')} {self.value(properties[name], f'{at}.properties.{name}')}"
            skip_none, skip_some = ("", "") if name in required else (f" | {after_none}", f" | {after_some}")
            after_none = self._named(f"{pair} {after_some}{skip_none}")
            after_some = self._named(f'"," {pair} {after_some}{skip_some}')
        return f'"{{" {after_none} "}}"'

    def _literals(self, values: Sequence[Any], at: str) -> str:
        written = []
        for value in values:
            if isinstance(value, str):
                written.append(f"{self._quote} {quoted(value)} {self._quote}")
            elif value is None or isinstance(value, bool | int | float):
                written.append(quoted(json.dumps(value)))
            else:
                raise _refused(at, "may hold only texts, numbers, true, false and null here")
        if not written:
            raise _refused(at, "must hold a value of the type")
        return self._named(" | ".join(written))

    def _named(self, body: str) -> str:
        self.lines.append(f"value_{len(self.lines)}: {body}")
        return f"value_{len(self.lines) - 1}"


def _only(schema: Mapping[str, Any], keys: set[str] | frozenset[str], at: str) -> None:
    for key in schema:
        if key not in _NOTES | keys:
            raise _refused(f"{at}.{key}", "cannot be held in the form in which this model calls tools")


def _is_of(value: Any, kinds: Any) -> bool:
    """Is a scalar of one of these types? None are any."""
    if kinds is None:
        return True
    own = {str: {"string"}, bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, type(None): {"null"}}
    wanted = kinds if isinstance(kinds, list) else [kinds]
    return not own.get(type(value), {"other"}).isdisjoint(map(str, wanted))


def _list(schema: Mapping[str, Any], key: str, at: str) -> list[Any]:
    value = schema[key]
    if not isinstance(value, list) or not value:
        raise _refused(f"{at}.{key}", "must be a list that is not empty")
    return value


def _bounds(schema: Mapping[str, Any], low: str, high: str, at: str) -> tuple[int, int | None]:
    for key in (low, high):
        value = schema.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
            raise _refused(f"{at}.{key}", f"must be a whole number from 0 to {_MOST}")
    least, most = schema.get(low, 0), schema.get(high)
    if most is not None and least > most:
        raise _refused(f"{at}.{low}", f"must not be more than {high}")
    return least, most


def _refused(at: str, why: str) -> RequestError:
    return RequestError(f"{at} {why}", at)
