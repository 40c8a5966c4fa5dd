"""Judges `tools`, `tool_choice` and `parallel_tool_calls`; says what of calls an answer must hold. Pure functions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.constrain.patterns import bounded
from headrace.errors import RequestError
from headrace.params import Grammar
from headrace.serve.fields import CACHE_HINT
from headrace.serve.reading import QUOTED, check_keys, quoted
from headrace.serve.structured import Form as Content
from headrace.tokenize.messages import plain
from headrace.tokenize.tools.form import Form, Spelling, Tool, Wanted

MAX_TOOLS = 128
"""Most tools of one request."""
CHOICES = ("none", "auto", "required")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SLASH = re.compile(r"\\.|/", re.DOTALL)
_KEYS = ("name", "description", "parameters", "strict", "return", "response")
"""Of a function; the last two are what some templates show of its result."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools that an answer may call."""

    tools: tuple[Tool, ...]
    shown: tuple[Mapping[str, Any], ...]
    """All tools of the request as templates read them."""
    wanted: Wanted

    @property
    def names(self) -> list[str]:
        return [tool.name for tool in self.tools]

    def any_text(self, content: Content | None) -> bool:
        """May an answer of text begin anyhow?"""
        return not self.wanted.required and content is None

    @property
    def most(self) -> int | None:
        """Most calls of the answer."""
        return None if self.wanted.several else 1

    def grammar(self, form: Form, spelling: Spelling, content: Content | None) -> Grammar | None:
        """What holds the answer to the offer; None where it is free anyway. `content`: what an answer without calls
        must be; one that must have calls has none."""
        wanted = self.wanted
        if content is not None and not wanted.required:
            wanted = replace(wanted, content=_rule(content, form))
        elif wanted.several and not wanted.required and not any(tool.strict for tool in self.tools):
            return None
        return Grammar("lark", form.grammar([self._as_held(tool) for tool in self.tools], wanted, spelling))

    def _as_held(self, tool: Tool) -> Tool:
        """With its schema judged, where an answer is held to it. RequestError names the part at fault."""
        from headrace.constrain.schema import judgement

        if not (self.wanted.required or tool.strict):
            return tool
        at = f"{tool.at}.function.parameters"
        try:
            return replace(tool, judged=judgement(tool.parameters, at).schema)
        except RequestError as error:
            raise RequestError(f"{error.param}: {error}", error.param) from None

    def schemas(self) -> list[tuple[str, Grammar]]:
        """Each schema that an answer is held to, and what errors call it."""
        held = [tool for tool in self.tools if self.wanted.required or tool.strict]
        return [(f"{tool.at}.function.parameters", Grammar("json", json.dumps(tool.parameters))) for tool in held]


def offer(tools: Sequence[Any] | None, choice: Any, parallel: bool | None) -> Offer | None:
    """None where no tool may be called. RequestError names the field, "tools[2].function.name"."""
    shown, known = _judged(tools or ())
    chosen = _chosen(choice, known)
    if chosen is None or not known:
        return None
    names, wanted = chosen
    wanted = Wanted(wanted.required, wanted.several and parallel is not False)
    return Offer(tuple(known[name] for name in names), shown, wanted)


def _rule(content: Content, form: Form) -> str:
    """As the body of a rule. RequestError where it cannot stand beside calls."""
    kind, source = content.grammar.kind, content.grammar.source
    if form.firsts:
        why = "this model's calls look like any other answer in JSON"
    elif kind == "regex":
        bounded(source, content.name)
        return f"/{_SLASH.sub(lambda found: found[0] if len(found[0]) > 1 else chr(92) + '/', source)}/"
    elif kind in ("json", "choice"):
        return _json_rule(_loaded(source, content.name), content.name)
    else:
        why = "a grammar cannot stand beside calls"
    raise RequestError(
        f"{content.name} cannot be held where the model may call tools: {why}; use tool_choice none or required",
        content.name,
    )


def _json_rule(value: Any, at: str) -> str:
    """A schema, or texts to choose from."""
    from headrace.constrain.schema import judged

    if isinstance(value, list) and value and all(isinstance(text, str) and text for text in value):
        return " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
    try:
        return f"%json {judged(value, at)}"
    except RequestError as error:
        raise RequestError(f"{error.param}: {error}", error.param) from None


def _loaded(source: str, at: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{at} must be JSON: {error}", at) from None


def _judged(tools: Sequence[Any]) -> tuple[tuple[Mapping[str, Any], ...], dict[str, Tool]]:
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} entries, more than the {MAX_TOOLS} allowed", "tools")
    shown, known = [], {}
    for i, entry in enumerate(tools):
        at = f"tools[{i}]"
        function = _function(entry, at)
        tool = _tool(function, at)
        if tool.name in known:
            raise RequestError(f"{at}.function.name: there are two tools {tool.name!r}", f"{at}.function.name")
        known[tool.name] = tool
        kept = {key: value for key, value in function.items() if value is not None and key != "strict"}
        shown.append({"type": "function", "function": kept})
    return tuple(shown), known


def _function(entry: Any, at: str) -> Mapping[str, Any]:
    if not isinstance(entry, dict) or entry.get("type") != "function":
        kind = entry.get("type") if isinstance(entry, dict) else entry
        raise RequestError(f"{at}.type must be function, not {quoted(kind)}", f"{at}.type")
    function = entry.get("function")
    if not isinstance(function, dict):
        raise RequestError(f"{at}.function must be an object with a name, not {quoted(function)}", f"{at}.function")
    check_keys(entry, at, "type", "function", CACHE_HINT)
    check_keys(function, f"{at}.function", *_KEYS, CACHE_HINT)
    return {key: value for key, value in function.items() if key != CACHE_HINT}


def _tool(function: Mapping[str, Any], at: str) -> Tool:
    name, strict = function.get("name"), function.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{at}.function.name must be 1 to 64 letters, digits, _, - or ., not {quoted(name)}", f"{at}.function.name"
        )
    if not isinstance(function.get("description", ""), str | None):
        raise RequestError(f"{at}.function.description must be a string", f"{at}.function.description")
    if not isinstance(strict, bool | None):
        raise RequestError(f"{at}.function.strict must be true or false, not {quoted(strict)}", f"{at}.function.strict")
    schema = function.get("parameters")
    return Tool(name, _schema(schema, f"{at}.function.parameters"), bool(strict), at)


def _schema(schema: Any, at: str) -> Mapping[str, Any]:
    """Its outline; what stands in it is judged where an answer is held to it."""
    if schema is None:
        return {"type": "object", "properties": {}}
    if not isinstance(schema, dict):
        raise RequestError(f"{at} must be a JSON schema of an object, not {quoted(schema)}", at)
    if schema.get("type", "object") != "object":
        raise RequestError(f"{at}.type must be object, not {quoted(schema['type'])}", f"{at}.type")
    if not isinstance(schema.get("properties", {}), dict):
        raise RequestError(f"{at}.properties must be an object", f"{at}.properties")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise RequestError(f"{at}.required must be a list of names", f"{at}.required")
    copy: Mapping[str, Any] = plain(schema, at)
    return copy


def _chosen(choice: Any, known: Mapping[str, Tool]) -> tuple[list[str], Wanted] | None:
    """Which tools may be called, and what the answer must hold; None for no calls."""
    match choice:
        case None | "auto":
            return list(known), Wanted()
        case "none":
            return None
        case "required":
            if not known:
                raise RequestError("tool_choice required needs at least one entry in tools", "tool_choice")
            return list(known), Wanted(required=True)
        case {"type": "function", "function": {"name": str(name)}}:
            if name not in known:
                there = f"only {', '.join(known)}" if known else "tools is empty"
                raise RequestError(
                    f"tool_choice names the function {quoted(name)}, which is not in tools: {there[:QUOTED]}",
                    "tool_choice.function.name",
                )
            return [name], Wanted(required=True, several=False)
        case {"type": "function"}:
            raise RequestError(
                'tool_choice.function must be an object with the name of a function, {"name": ...}',
                "tool_choice.function",
            )
        case {"type": kind}:
            raise RequestError(f"tool_choice.type must be function, not {quoted(kind)}", "tool_choice.type")
    raise RequestError(
        f"tool_choice must be {', '.join(CHOICES)} or "
        f'{{"type": "function", "function": {{"name": ...}}}}, not {quoted(choice)}',
        "tool_choice",
    )
