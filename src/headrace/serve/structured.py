"""What a body says of the form of its answer, `response_format` and `structured_outputs`, as a grammar. Pure functions.

https://platform.openai.com/docs/guides/structured-outputs has the first, vLLM's documentation the second.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace.constrain.lark import admit
from headrace.errors import RequestError
from headrace.params import Grammar
from headrace.serve.reading import check_keys, quoted

KINDS = ("json", "json_object", "regex", "choice", "grammar")
"""Keys of `structured_outputs`, of which a request has one."""

OBJECT = '{"type": "object"}'
"""The schema of any JSON object."""


class Form(NamedTuple):
    """A grammar, and what the client calls it."""

    grammar: Grammar
    name: str


def form_of(response_format: Any, structured_outputs: Any) -> Form | None:
    """None where an answer may be anything. RequestError names the key at fault."""
    ours = _structured(structured_outputs) if structured_outputs is not None else None
    theirs = _response_format(response_format) if response_format is not None else None
    if ours is not None and theirs is not None:
        raise RequestError(
            "response_format and structured_outputs say both what the answer must be: give one of them",
            "structured_outputs",
        )
    return ours or theirs


def _response_format(value: Any) -> Form | None:
    at = "response_format"
    kind = _object(value, at).get("type")
    match kind:
        case "text":
            check_keys(value, at, "type")
            return None
        case "json_object":
            check_keys(value, at, "type")
            return Form(Grammar("json", OBJECT), at)
        case "json_schema":
            check_keys(value, at, "type", "json_schema")
            return _named_schema(value.get("json_schema"), f"{at}.json_schema")
    raise RequestError(f"{at}.type must be text, json_object or json_schema, not {quoted(kind)}", f"{at}.type")


def _named_schema(value: Any, at: str) -> Form:
    """OpenAI's `json_schema`. `strict` makes no difference: every schema is enforced."""
    check_keys(_object(value, at), at, "name", "description", "schema", "strict")
    for key, kind in (("name", str), ("description", str | None), ("strict", bool | None)):
        if not isinstance(value.get(key), kind):
            raise RequestError(f"{at}.{key} must be {_WORDS[key]}, not {quoted(value.get(key))}", f"{at}.{key}")
    if "schema" not in value:
        raise RequestError(f"{at}.schema is missing", f"{at}.schema")
    return _schema(value["schema"], f"{at}.schema")


_WORDS = {"name": "a string", "description": "a string", "strict": "true or false"}


def _structured(value: Any) -> Form:
    at = "structured_outputs"
    given = {key: said for key, said in _object(value, at).items() if said is not None}
    check_keys(given, at, *KINDS)
    if len(given) != 1:
        raise RequestError(f"{at} must have one of {', '.join(KINDS)}, not {len(given)} of them", at)
    ((key, said),) = given.items()
    at = f"{at}.{key}"
    match key:
        case "json":
            return _schema(said, at)
        case "json_object":
            if said is not True:
                raise RequestError(f"{at} must be true, not {quoted(said)}", at)
            return Form(Grammar("json", OBJECT), at)
        case "choice":
            return Form(_grammar("choice", json.dumps(_choices(said, at), ensure_ascii=False), at), at)
        case "regex":
            return Form(_grammar("regex", _text(said, at), at), at)
    text = _text(said, at)
    if "::=" in text:
        return Form(_grammar("gbnf", text, at), at)
    form = Form(_grammar("lark", text, at), at)
    admit(text, at)
    return form


def _schema(value: Any, at: str) -> Form:
    if not isinstance(value, dict | bool):
        if not isinstance(value, str):
            raise RequestError(f"{at} must be a JSON schema, an object, not {quoted(value)}", at)
        return Form(_grammar("json", value, at), at)  # as JSON text, which some clients send
    return Form(_grammar("json", json.dumps(value, ensure_ascii=False), at), at)


def _grammar(kind: str, source: str, at: str) -> Grammar:
    try:
        return Grammar(kind, source)
    except RequestError as error:
        raise RequestError(f"{at} is refused: {error}", at) from None


def _object(value: Any, at: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{at} must be an object, not {quoted(value)}", at)
    return value


def _text(value: Any, at: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{at} must be a string, not {quoted(value)}", at)
    return value


def _choices(value: Any, at: str) -> list[str]:
    if not isinstance(value, list):
        raise RequestError(f"{at} must be a list of strings, not {quoted(value)}", at)
    if not value:
        raise RequestError(f"{at} must hold at least one string: nothing satisfies an empty list", at)
    for i, text in enumerate(value):
        if not isinstance(text, str) or not text:
            raise RequestError(f"{at}[{i}] must be a string that is not empty, not {quoted(text)}", f"{at}[{i}]")
    return value
