"""Judges JSON schemas before the library sees them: what cannot be honoured is refused, by its path.

It fails closed: every answer that the library then allows is right by the schema as it was given. Text in, text out.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote

from headrace.constrain import numbers, shapes
from headrace.constrain.keywords import (
    ANNOTATIONS,
    FORMATS,
    FREE_FORMATS,
    HONOURED,
    NEUTRAL,
    RANGES,
    REFUSED,
    TYPES,
)
from headrace.constrain.patterns import WEIGHT, PatternError, portable, weight
from headrace.errors import RequestError

SCHEMAS = 2_000
"""Most schemas in one, counting those inside."""
WRITTEN_OUT = 6_000
"""Most of them once every `$ref` beside other words is written out, and alternatives are multiplied."""
DEPTH = 32
"""Deepest a schema may stand inside others, and a value of `enum` or `const` inside others."""
VALUES = 5_000
"""Most values in all `enum`s and `const`s, counting those inside."""
TEXT = 4_096
"""Longest name of a property and longest string in `enum` or `const`, in characters."""
TEXTS = 65_536
"""All of them together; and all patterns."""
MEETING = 8
"""Most patterns and formats that one text must match at once: 16 cost seconds and gigabytes."""
LENGTH = 65_536
"""Largest `minLength` and `maxLength`; beside a `pattern` or `format`, what the library finds out to be possible."""
COUNT = 4_096
"""Largest `minItems`, `maxItems`, `minProperties` and `maxProperties`; in all, four times as much."""
SHOWN = 60
"""Longest piece of a schema that is shown, in characters."""

BLANKS = r"[ \t\n\r]{1,8}"
"""Blanks between the parts of a JSON document: more are never needed, and small models write nothing else for ever."""

OPTIONS: Mapping[str, object] = {
    "whitespace_flexible": True,
    "whitespace_pattern": BLANKS,
    "json_allowed_escapes": 'nrbtf\\"',  # with \u every name could be written a second time, unnoticed
}
"""How JSON is written; the library's."""

_UNWRITABLE = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Judged:
    """A schema that the library may see."""

    schema: dict[str, Any]
    paths: dict[tuple[str, ...], str]
    """For every schema in it, the way there and what its client calls it."""


def judged(value: Any, at: str = "grammar", options: Mapping[str, object] = OPTIONS) -> str:
    """JSON text for `%json`, with the library's options. RequestError names the path at fault, from `at` on."""
    return text_of(judgement(value, at).schema, options)


def judgement(value: Any, at: str = "grammar") -> Judged:
    """RequestError names the path at fault, from `at` on."""
    try:
        return _Judge(value, at).judged()
    except RecursionError:
        raise RequestError("its references lead into each other too deep", at) from None


def text_of(schema: Mapping[str, Any], options: Mapping[str, object] = OPTIONS) -> str:
    """As the library wants it."""
    return json.dumps({**schema, "x-guidance": dict(options)}, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class _Here:
    """One schema: as it was given, as it goes on, and where that is."""

    raw: Mapping[str, Any]
    out: dict[str, Any]
    way: tuple[str, ...]
    """In what goes on."""
    given: tuple[str, ...]
    """In what was given."""
    at: str
    more: list[dict[str, Any]] = field(default_factory=list)
    """Schemas that hold besides."""

    def refuse(self, message: str, *keys: str | int) -> RequestError:
        return RequestError(message, path(self.at, *keys))


@dataclass(slots=True)
class _Sums:
    schemas: int = 0
    values: int = 0
    texts: int = 0
    patterns: int = 0
    counts: int = 0


def path(at: str, *keys: str | int) -> str:
    """The path of something inside."""
    return at + "".join(f"[{key}]" if isinstance(key, int) else f".{key[:SHOWN]}" for key in keys)


def shown(value: object) -> str:
    """A piece of the schema, for a message."""
    text = json.dumps(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def hint(word: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(word[:SHOWN], known, 1)
    return f"; did you mean {near[0]}?" if near else ""


@dataclass(slots=True)
class _Judge:
    root: Any
    at: str
    places: dict[tuple[str, ...], tuple[tuple[str, ...], Any, str]] = field(default_factory=dict)
    """For every schema, by its way in what was given: its way in what goes on, itself, its path."""
    refs: list[_Here] = field(default_factory=list)
    targets: dict[str, Any] = field(default_factory=dict)
    alternatives: list[_Here] = field(default_factory=list)
    multiples: list[tuple[numbers.Multiple, str]] = field(default_factory=list)
    sums: _Sums = field(default_factory=_Sums)

    def judged(self) -> Judged:
        out = self.schema(self.root, (), (), self.at)
        renamed = self._point()
        if isinstance(out, bool):
            out = {} if out else {"enum": []}
        if shapes.endless(out, self.targets.__getitem__):
            raise RequestError("no document that ends satisfies it: it needs another of its own kind inside", self.at)
        if (size := shapes.size(out, self.targets.__getitem__)) > WRITTEN_OUT:
            raise RequestError(
                f"written out it has {'over a billion' if size >= shapes.MOST else size} schemas, more than the "
                f"{WRITTEN_OUT} allowed: use fewer alternatives, and $ref without other keywords beside it",
                self.at,
            )
        if shapes.meeting(out, self.targets.__getitem__) > MEETING:
            raise RequestError(f"allOf and $ref bring more than {MEETING} patterns and formats together", self.at)
        if (fault := numbers.together(self.multiples)) is not None:
            raise RequestError("the multipleOf of this schema are too many or too large together", fault)
        paths = {_renamed(way, renamed): at for way, _, at in self.places.values()}
        return Judged(out, paths)

    def schema(self, raw: Any, given: tuple[str, ...], way: tuple[str, ...], at: str) -> Any:
        """What goes on of one schema."""
        self.sums.schemas += 1
        if self.sums.schemas > SCHEMAS:
            raise RequestError(f"the schema has more than {SCHEMAS} schemas inside", at)
        if isinstance(raw, bool):
            self.places[given] = way, raw, at
            return raw
        if not isinstance(raw, dict):
            raise RequestError(f"a schema must be an object, true or false, not {shown(raw)}", at)
        if sum(one in _NESTING for one in way) > DEPTH:
            raise RequestError(f"schemas stand in each other deeper than {DEPTH}", at)
        here = _Here(raw, {}, way, given, at)
        self.places[given] = way, here.out, at
        for key, said in raw.items():
            if self._is_honoured(here, key, said):
                _READ[key](self, here, key, said)
        for check in _CHECKS:
            check(self, here)
        if here.more:
            here.out["allOf"] = [*here.out.get("allOf", ()), *here.more]
        return here.out

    def _is_honoured(self, here: _Here, key: str, said: Any) -> bool:
        if key in HONOURED:
            return True
        if key in REFUSED:
            if any(type(said) is type(value) and said == value for value in NEUTRAL.get(key, ())):
                return False
            raise here.refuse(f"the keyword {key} is not supported: {REFUSED[key]}", key)
        if key in ANNOTATIONS or key.startswith("x-"):
            return False
        raise here.refuse(f"unknown keyword {shown(key)}{hint(key, (*HONOURED, *ANNOTATIONS, *REFUSED))}", key)

    def inside(self, here: _Here, raw: Any, key: str, to: str, name: str | int | None = None) -> Any:
        """A schema inside another: at `key` in what was given, at `to` in what goes on."""
        keys = (key,) if name is None else (key, name)
        way = (to,) if name is None else (to, str(name))
        return self.schema(raw, (*here.given, *map(str, keys)), (*here.way, *way), path(here.at, *keys))

    # keywords, each by one reader

    def _type(self, here: _Here, key: str, said: Any) -> None:
        types = said if isinstance(said, list) else [said]
        if not types:
            raise here.refuse("type must name a type at least", key)
        for number, one in enumerate(types):
            if not isinstance(one, str) or one not in TYPES:
                near = hint(one, TYPES) if isinstance(one, str) else ""
                where = (key, number) if isinstance(said, list) else (key,)
                raise here.refuse(f"a type must be one of {', '.join(TYPES)}, not {shown(one)}{near}", *where)
        here.out[key] = said

    def _enum(self, here: _Here, key: str, said: Any) -> None:
        if not isinstance(said, list) or not said:
            raise here.refuse(f"enum must be a list of values that is not empty, not {shown(said)}", key)
        for number, value in enumerate(said):
            self._literal(here, value, (key, number), 0)
        here.out[key] = said

    def _const(self, here: _Here, key: str, said: Any) -> None:
        self._literal(here, said, (key,), 0)
        here.out[key] = said

    def _literal(self, here: _Here, value: Any, keys: tuple[str | int, ...], depth: int) -> None:
        self.sums.values += 1
        if self.sums.values > VALUES:
            raise here.refuse(f"enum and const have more than {VALUES} values", *keys)
        if depth > DEPTH:
            raise here.refuse(f"values stand in each other deeper than {DEPTH}", *keys[:1])
        if isinstance(value, str):
            self._text(here, value, *keys)
        elif isinstance(value, int | float) and not isinstance(value, bool) and not numbers.exact(value):
            raise here.refuse("the number cannot be held exactly: 53 binary digits are kept", *keys)
        elif isinstance(value, list):
            for one in value:
                self._literal(here, one, keys, depth + 1)
        elif isinstance(value, dict):
            for name, one in value.items():
                self._text(here, name, *keys)
                self._literal(here, one, keys, depth + 1)

    def _text(self, here: _Here, text: str, *keys: str | int) -> None:
        self.sums.texts += len(text)
        if len(text) > TEXT:
            raise here.refuse(f"a text has {len(text)} characters, more than the {TEXT} allowed", *keys)
        if self.sums.texts > TEXTS:
            raise here.refuse(f"names, enum and const have more than {TEXTS} characters together", *keys)
        if found := _UNWRITABLE.search(text):
            raise here.refuse(f"the control character U+{ord(found[0]):04X} in a text is not supported", *keys)

    def _several(self, here: _Here, key: str, said: Any) -> None:
        if not isinstance(said, list) or not said:
            raise here.refuse(f"{key} must be a list of schemas that is not empty, not {shown(said)}", key)
        here.out[key] = [self.inside(here, one, key, key, number) for number, one in enumerate(said)]
        if key == "oneOf":
            self.alternatives.append(here)

    def _named(self, here: _Here, key: str, said: Any) -> None:
        if not isinstance(said, dict):
            raise here.refuse(f"{key} must be an object of schemas, not {shown(said)}", key)
        if key == "properties":
            for name in said:
                self._text(here, name, key, name)
        here.out[key] = {name: self.inside(here, one, key, key, name) for name, one in said.items()}

    def _patterns(self, here: _Here, key: str, said: Any) -> None:
        if not isinstance(said, dict):
            raise here.refuse(f"{key} must be an object of schemas, not {shown(said)}", key)
        here.out[key] = out = {}
        for pattern, one in said.items():
            regex = self._regex(here, pattern, key, pattern)
            if regex in out:
                raise here.refuse("two patterns are the same", key, pattern)
            keys = (key, pattern)
            out[regex] = self.schema(one, (*here.given, *keys), (*here.way, key, regex), path(here.at, *keys))

    def _regex(self, here: _Here, pattern: Any, *keys: str | int) -> str:
        if not isinstance(pattern, str):
            raise here.refuse(f"a pattern must be a string, not {shown(pattern)}", *keys)
        try:
            regex = portable(pattern)
        except PatternError as error:
            raise here.refuse(f"the pattern {shown(pattern)} cannot be honoured: {error}", *keys) from None
        self.sums.patterns += weight(regex)
        if self.sums.patterns > WEIGHT:
            raise here.refuse(f"patterns count out more than {WEIGHT} characters", *keys)
        if _UNWRITABLE.search(pattern):
            raise here.refuse("write control characters as escapes", *keys)
        return regex

    def _one(self, here: _Here, key: str, said: Any) -> None:
        here.out[key] = self.inside(here, said, key, key)

    def _items(self, here: _Here, key: str, said: Any) -> None:
        """A list is what `prefixItems` is since 2020."""
        if not isinstance(said, list):
            self._one(here, key, said)
            return
        if "prefixItems" in here.raw:
            raise here.refuse("items is a list, which prefixItems is already", key)
        here.out["prefixItems"] = [
            self.inside(here, one, key, "prefixItems", number) for number, one in enumerate(said)
        ]

    def _prefix(self, here: _Here, key: str, said: Any) -> None:
        if not isinstance(said, list):
            raise here.refuse(f"{key} must be a list of schemas, not {shown(said)}", key)
        here.out[key] = [self.inside(here, one, key, key, number) for number, one in enumerate(said)]

    def _more_items(self, here: _Here, key: str, said: Any) -> None:
        if not isinstance(here.raw.get("items"), list):
            raise here.refuse("additionalItems means something only beside a list of items", key)
        here.out["items"] = self.inside(here, said, key, "items")

    def _required(self, here: _Here, key: str, said: Any) -> None:
        if not isinstance(said, list):
            raise here.refuse(f"required must be a list of names, not {shown(said)}", key)
        closed = here.raw.get("additionalProperties") is False and "patternProperties" not in here.raw
        properties = here.raw.get("properties")
        for number, name in enumerate(said):
            if not isinstance(name, str):
                raise here.refuse(f"a required name must be a string, not {shown(name)}", key, number)
            self._text(here, name, key, number)
            if closed and not (isinstance(properties, dict) and name in properties):
                raise here.refuse(f"{shown(name)} is required but not in properties", key, number)
        here.out[key] = said

    def _number(self, here: _Here, key: str, said: Any) -> None:
        if not numbers.is_number(said):
            raise here.refuse(f"{key} must be a number, not {shown(said)}", key)
        here.out[key] = said

    def _count(self, here: _Here, key: str, said: Any) -> None:
        if isinstance(said, float) and said.is_integer():
            said = int(said)
        if not isinstance(said, int) or isinstance(said, bool) or said < 0:
            raise here.refuse(f"{key} must be a whole number of at least 0, not {shown(said)}", key)
        most = LENGTH if key.endswith("Length") else COUNT
        if said > most:
            raise here.refuse(f"{key} is {shown(said)}, more than the {most} allowed", key)
        if most == COUNT:
            self.sums.counts += said
            if self.sums.counts > 4 * COUNT:
                raise here.refuse(f"the counts of items and properties are more than {4 * COUNT} together", key)
        here.out[key] = said

    def _multiple(self, here: _Here, key: str, said: Any) -> None:
        try:
            self.multiples.append((numbers.Multiple.of(said), path(here.at, key)))
        except ValueError as error:
            raise here.refuse(f"multipleOf {error}", key) from None
        here.out[key] = said

    def _pattern(self, here: _Here, key: str, said: Any) -> None:
        here.out[key] = self._regex(here, said, key)

    def _format(self, here: _Here, key: str, said: Any) -> None:
        if not isinstance(said, str):
            raise here.refuse(f"format must be a string, not {shown(said)}", key)
        types = here.raw.get("type", list(TYPES))
        types = {types} if isinstance(types, str) else set(types) if isinstance(types, list) else set()
        if said in FORMATS:
            if "pattern" in here.raw:
                here.more.append({"pattern": portable(FORMATS[said])})
            else:
                here.out["pattern"] = portable(FORMATS[said])
        elif said in RANGES and not types & {"string", "number"}:
            bounds = dict(zip(("minimum", "maximum"), RANGES[said], strict=True))
            here.more.append(bounds | numbers.brought_in({"type": "integer", **bounds}))
        elif said not in FREE_FORMATS:
            known = (*FORMATS, *RANGES, *FREE_FORMATS)
            raise here.refuse(f"unknown format {shown(said)}{hint(said, known)}; {', '.join(known)} are known", key)

    def _ref(self, here: _Here, key: str, said: Any) -> None:
        if not isinstance(said, str) or not said.startswith("#"):
            raise here.refuse(f"$ref must begin with #/ and point into this schema, not {shown(said)}", key)
        here.out[key] = said
        self.refs.append(here)

    # what is wrong only together

    def _bounds(self, here: _Here) -> None:
        for least, most in (
            *(("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties")),
            *(("minimum", "maximum"),),
        ):
            if least in here.out and most in here.out and here.out[least] > here.out[most]:
                low, high = shown(here.out[least]), shown(here.out[most])
                raise here.refuse(f"{least} {low} is more than {most} {high}", least)
        here.out.update(numbers.brought_in(here.out))
        if (fault := numbers.unkept(here.out)) is not None:
            key, why = fault
            raise here.refuse(why, key)

    def _listed(self, here: _Here) -> None:
        listed = shapes.values(here.out)
        if listed is None or "type" not in here.out:
            return
        types = {here.out["type"]} if isinstance(here.out["type"], str) else set(here.out["type"])
        if not any(_is_of(value, types) for value in listed):
            key = "const" if "const" in here.out else "enum"
            raise here.refuse(f"no value is of type {shown(here.out['type'])}", key)

    def _how_many(self, here: _Here) -> None:
        """Names that are not in `properties` may come twice, and count once."""
        least = here.out.get("minProperties", 0)
        certain = len(set(here.out.get("required", ())))
        if least > certain + 1:
            raise here.refuse(
                f"minProperties {least} needs {least - 1} required names at least: others may be written twice",
                "minProperties",
            )

    # references

    def _point(self) -> set[tuple[str, ...]]:
        """Every `$ref` finds its schema. The ways of schemas whose `oneOf` became `anyOf`."""
        for here in self.refs:
            said = here.out["$ref"]
            given = self._given(here, said)
            if given not in self.places:
                raise here.refuse(f"$ref {shown(said)} does not point to a schema", "$ref")
            self.targets[said] = self.places[given][1]
        loops = shapes.loops(self.places[()][1], self.targets.__getitem__)
        for here in self.refs:
            if id(here.out) in loops:
                raise here.refuse("$ref comes back to its own schema with nothing in between", "$ref")
        apart = shapes.Apart(self.targets.__getitem__)
        renamed = {here.way for here in self.alternatives if self._is_any(here, apart)}
        for here in self.refs:
            way = _renamed(self.places[self._given(here, here.out["$ref"])][0], renamed)
            text = "#" + "".join("/" + quote(key.replace("~", "~0").replace("/", "~1"), safe="~$") for key in way)
            self.targets[text] = self.targets[here.out["$ref"]]
            here.out["$ref"] = text
        return renamed

    def _given(self, here: _Here, said: str) -> tuple[str, ...]:
        pointer = unquote(said[1:], errors="replace")
        if pointer and not pointer.startswith("/"):
            raise here.refuse(f"$ref {shown(said)} is a name: write the path, as in #/$defs/name", "$ref")
        return tuple(key.replace("~1", "/").replace("~0", "~") for key in pointer.split("/")[1:])

    def _is_any(self, here: _Here, apart: shapes.Apart) -> bool:
        """`oneOf` is `anyOf` where no value can be two of them."""
        out, each = here.out, here.out["oneOf"]
        pairs = [(a, b) for number, a in enumerate(each) for b in each[:number]]
        if "anyOf" in out or len(pairs) > SCHEMAS or not all(apart(a, b) for a, b in pairs):
            return False
        kept = {"anyOf" if key == "oneOf" else key: said for key, said in out.items()}
        out.clear()
        out.update(kept)
        return True


def _renamed(way: tuple[str, ...], renamed: set[tuple[str, ...]]) -> tuple[str, ...]:
    out = list(way)
    for number, key in enumerate(way):
        if key == "oneOf" and way[:number] in renamed:
            out[number] = "anyOf"
    return tuple(out)


def _is_of(value: object, types: set[str]) -> bool:
    whole = isinstance(value, int | float) and math.isfinite(value) and value == int(value)
    return shapes.kind(value) in types or ("integer" in types and whole and not isinstance(value, bool))


_NESTING = (
    *("properties", "patternProperties", "additionalProperties"),
    *("items", "prefixItems", "anyOf", "oneOf", "allOf"),
)

_READ: dict[str, Callable[[_Judge, _Here, str, Any], None]] = {
    "type": _Judge._type,
    "enum": _Judge._enum,
    "const": _Judge._const,
    "$ref": _Judge._ref,
    "pattern": _Judge._pattern,
    "format": _Judge._format,
    "items": _Judge._items,
    "prefixItems": _Judge._prefix,
    "additionalItems": _Judge._more_items,
    "additionalProperties": _Judge._one,
    "patternProperties": _Judge._patterns,
    "required": _Judge._required,
    "multipleOf": _Judge._multiple,
    **dict.fromkeys(("anyOf", "oneOf", "allOf"), _Judge._several),
    **dict.fromkeys(("properties", "$defs", "definitions"), _Judge._named),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _Judge._number),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _Judge._count
    ),
}
_CHECKS = (_Judge._bounds, _Judge._listed, _Judge._how_many)
