"""What can be told of a judged schema without compiling it: types, whether two exclude each other, whether a document
can come to its end, how large it becomes. Pure functions; `Resolve` gives the schema that a `$ref` stands for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Schema = Any
"""A mapping, or true or false."""
Resolve = Callable[[str], Schema]

KINDS = frozenset({"null", "boolean", "number", "string", "array", "object"})
STEPS = 20_000
"""Most comparisons of two schemas in one."""
MOST = 10**9
"""A size that is too large in any case."""

_SAYS_NOTHING = {"$ref", "$defs", "definitions"}


def parts(schema: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Schema]]:
    """Schemas right inside, each with its way there."""
    for key, said in schema.items():
        if key in ("$defs", "definitions", "properties", "patternProperties"):
            yield from (((key, name), one) for name, one in said.items())
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            yield from (((key, str(number)), one) for number, one in enumerate(said))
        elif key in ("items", "additionalProperties"):
            yield (key,), said


def everything(schema: Schema) -> Iterator[Mapping[str, Any]]:
    """It and all schemas inside, but true and false."""
    if isinstance(schema, Mapping):
        yield schema
        for _, one in parts(schema):
            yield from everything(one)


def kind(value: object) -> str:
    """The type of a JSON value, integers being numbers."""
    if isinstance(value, bool):
        return "boolean"
    for name, of in (("string", str), ("number", int | float), ("array", list), ("object", dict)):
        if isinstance(value, of):
            return name
    return "null"


def values(schema: Schema) -> list[Any] | None:
    """All that it allows, where it lists them; perhaps more than it allows."""
    if not isinstance(schema, Mapping):
        return None
    return [schema["const"]] if "const" in schema else schema.get("enum")


class Apart:
    """Tells whether it is certain that no value is both of two schemas. Whoever asks too much is told no."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._kinds: dict[int, frozenset[str]] = {}
        self._left = STEPS

    def __call__(self, one: Schema, other: Schema, depth: int = 4) -> bool:
        self._left -= 1
        if self._left < 0:
            return False
        one, other = self._target(one), self._target(other)
        both = self.kinds(one) & self.kinds(other)
        if not both:
            return True
        if not isinstance(one, Mapping) or not isinstance(other, Mapping):
            return False
        mine, yours = values(one), values(other)
        if mine is not None and yours is not None:
            return {same(value) for value in mine}.isdisjoint({same(value) for value in yours})
        if both != {"object"} or not depth:
            return False
        mine, yours = one.get("properties", {}), other.get("properties", {})
        needed = {*one.get("required", ()), *other.get("required", ())}
        return any(self(mine[name], yours[name], depth - 1) for name in needed if name in mine and name in yours)

    def kinds(self, schema: Schema) -> frozenset[str]:
        """Types that a value may have; perhaps more."""
        if not isinstance(schema, Mapping):
            return KINDS if schema else frozenset()
        if id(schema) not in self._kinds:
            self._kinds[id(schema)] = KINDS  # while it is found out: it may need itself
            self._kinds[id(schema)] = self._found(schema)
        return self._kinds[id(schema)]

    def _found(self, schema: Mapping[str, Any]) -> frozenset[str]:
        found = KINDS
        if "type" in schema:
            said = schema["type"]
            found &= {"number" if one == "integer" else one for one in ([said] if isinstance(said, str) else said)}
        if (listed := values(schema)) is not None:
            found &= {kind(value) for value in listed}
        if "$ref" in schema:
            found &= self.kinds(self._resolve(schema["$ref"]))
        for one in schema.get("allOf", ()):
            found &= self.kinds(one)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                found &= frozenset().union(*map(self.kinds, schema[key]))
        return found

    def _target(self, schema: Schema) -> Schema:
        seen: set[str] = set()
        while isinstance(schema, Mapping) and "$ref" in schema and schema.keys() <= _SAYS_NOTHING:
            if schema["$ref"] in seen:
                break
            seen.add(schema["$ref"])
            schema = self._resolve(schema["$ref"])
        return schema


def same(value: object) -> str:
    """Equal for values that are equal in JSON."""
    if isinstance(value, list):
        return f"[{','.join(map(same, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(key)}:{same(value[key])}' for key in sorted(value))}}}"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value)


def loops(root: Schema, resolve: Resolve) -> set[int]:
    """Identities of schemas by which a value has to be judged in order to be judged by them, and of those
    that only stand between two such."""
    after: dict[int, set[int]] = {id(schema): set(map(id, _in_place(schema, resolve))) for schema in everything(root)}
    for _ in range(2):  # first what leads nowhere is taken out, then what nothing leads to
        before: dict[int, set[int]] = {one: set() for one in after}
        for one, others in after.items():
            for other in others:
                before[other].add(one)
        free = [one for one, others in after.items() if not others]
        while free:
            gone = free.pop()
            del after[gone]
            for one in before.pop(gone):
                after[one].discard(gone)
                if not after[one]:
                    free.append(one)
        after = {one: before[one] & after.keys() for one in after}  # turned around
    return set(after)


def _in_place(schema: Mapping[str, Any], resolve: Resolve) -> list[Mapping[str, Any]]:
    """By which the same value is judged."""
    found = [one for key in ("allOf", "anyOf", "oneOf") for one in schema.get(key, ())]
    found += [resolve(schema["$ref"])] if "$ref" in schema else []
    return [one for one in found if isinstance(one, Mapping)]


def endless(root: Schema, resolve: Resolve) -> bool:
    """Does every document that the root allows need another inside, without end?"""
    schemas = _from_inside(root, resolve)
    ending: set[int] = set()
    grown = True
    while grown:
        grown = False
        for schema in schemas:
            if id(schema) not in ending and _ends(schema, ending, resolve):
                ending.add(id(schema))
                grown = True
    return not _ending(root, ending)


def _from_inside(root: Schema, resolve: Resolve) -> list[Mapping[str, Any]]:
    """All schemas that the root needs, each behind those that it needs where that is possible."""
    found: list[Mapping[str, Any]] = []
    seen: set[int] = set()
    left: list[tuple[Schema, bool]] = [(root, False)]
    while left:
        schema, done = left.pop()
        if not isinstance(schema, Mapping):
            continue
        if done:
            found.append(schema)
        elif id(schema) not in seen:
            seen.add(id(schema))
            left.append((schema, True))
            left += [(one, False) for _, one in parts(schema)]
            left += [(resolve(schema["$ref"]), False)] if "$ref" in schema else []
    return found


def _ending(schema: Schema, ending: set[int]) -> bool:
    return id(schema) in ending if isinstance(schema, Mapping) else bool(schema)


def _ends(schema: Mapping[str, Any], ending: set[int], resolve: Resolve) -> bool:
    if "$ref" in schema and not _ending(resolve(schema["$ref"]), ending):
        return False
    if not all(_ending(one, ending) for one in schema.get("allOf", ())):
        return False
    if not all(any(_ending(one, ending) for one in schema[key]) for key in ("anyOf", "oneOf") if key in schema):
        return False
    if values(schema) is not None:
        return True
    said = schema.get("type", sorted(KINDS))
    types = {said} if isinstance(said, str) else set(said)
    if types - {"array", "object"}:
        return True
    if "array" in types and _array_ends(schema, ending):
        return True
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    return "object" in types and all(
        _ending(properties.get(name, others if "patternProperties" not in schema else True), ending)
        for name in schema.get("required", ())
    )


def _array_ends(schema: Mapping[str, Any], ending: set[int]) -> bool:
    first, least = schema.get("prefixItems", []), schema.get("minItems", 0)
    if not all(_ending(one, ending) for one in first[:least]):
        return False
    return len(first) >= least or _ending(schema.get("items", True), ending)


def size(root: Schema, resolve: Resolve) -> int:
    """How many schemas it has once every `$ref` that has company is written out, and alternatives multiplied."""
    known: dict[str, tuple[int, int]] = {}
    names = sum(len(schema.get("properties", ())) for schema in everything(root))

    def of(schema: Schema, inlined: frozenset[str]) -> tuple[int, int]:
        """Of one schema: how many ways, and how much all of them are together."""
        if not isinstance(schema, Mapping):
            return 1, 1
        ways, much = 1, 1
        for way, one in parts(schema):
            if way[0] not in ("anyOf", "oneOf", "allOf", "$defs", "definitions"):
                much += of(one, frozenset())[1]
        for one in schema.get("allOf", ()):
            ways, much = _times((ways, much), of(one, inlined | {""}))
        for key in ("anyOf", "oneOf"):
            if key in schema:
                each = [of(one, inlined | ({""} if len(schema) > 1 else frozenset())) for one in schema[key]]
                ways, much = _times((ways, much), (sum(e[0] for e in each), sum(e[1] for e in each)))
        if "minProperties" in schema or "maxProperties" in schema:  # the library asks for each name in its turn
            ways, much = _times((ways, much), (max(1, names),) * 2)
        if "enum" in schema:  # a value alone costs little, one that must be something besides as much as that
            count = len(schema["enum"])
            ways, much = ways * count, much * (count if schema.keys() - {"enum", "type"} else 1) + count // 4
        ref = schema.get("$ref")
        if ref is not None and (schema.keys() - _SAYS_NOTHING or "" in inlined) and ref not in inlined:
            if ref not in known:
                known[ref] = (1, 1)  # what needs itself is refused by the library
                known[ref] = of(resolve(ref), inlined | {ref, ""})
            ways, much = _times((ways, much), known[ref])
        return min(ways, MOST), min(much, MOST)

    defined = [one for schema in everything(root) for way, one in parts(schema) if way[0] in ("$defs", "definitions")]
    return min(sum(of(one, frozenset())[1] for one in (root, *defined)), MOST)


def meeting(root: Schema, resolve: Resolve) -> int:
    """How many patterns one text may have to match at once; perhaps fewer."""
    known: dict[str, int] = {}

    def of(schema: Schema) -> int:
        if not isinstance(schema, Mapping):
            return 0
        inside = [of(one) for way, one in parts(schema) if way[0] not in ("anyOf", "oneOf", "allOf")]
        found = max([int("pattern" in schema), *inside])
        found += sum(of(one) for one in schema.get("allOf", ()))
        found += sum(max(of(one) for one in schema[key]) for key in ("anyOf", "oneOf") if key in schema)
        ref = schema.get("$ref")
        if ref is not None:
            if ref not in known:
                known[ref] = 0
                known[ref] = of(resolve(ref))
            found += known[ref]
        return min(found, MOST)

    return of(root)


def _times(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """Of two that must both hold."""
    return min(one[0] * other[0], MOST), min(one[1] * other[0] + other[1] * one[0], MOST)
