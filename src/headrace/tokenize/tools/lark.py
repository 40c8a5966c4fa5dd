"""Writes grammars of answers with calls in llguidance's dialect of Lark. Pure functions of text and schemas.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.tokenize.tools.form import Spelling, Tool, Wanted, quoted
from headrace.tokenize.tools.opening import openings, pattern, with_arguments, without_arguments
from headrace.tokenize.tools.regions import FENCE

_COMPOSED = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "propertyNames", "minProperties")
"""Keywords beside which `properties` does not say all that an object may hold."""
_OF_PROPERTIES = frozenset({"type", "properties", "required", "additionalProperties", "title", "description", "$defs"})
"""Keywords that ask nothing else of an object than to have what is required."""
_AS_JSON_IS_WRITTEN = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',  # with \u every name could be written a second time, unnoticed
}
"""One space behind commas and colons: what models were shown, and no room for endless blanks."""


def call_object(tool: Tool, number: int, key: str) -> str:
    """A call as an object on one line: the tool's name, and `arguments_N` under this key."""
    head = quoted(f'{{"name": {quoted(tool.name)}, "{key}": ')
    return f'{head} arguments_{number} "}}"'


def arguments(tools: Sequence[Tool], wanted: Wanted) -> list[str]:
    """A rule `arguments_N` for each tool: its schema where it is to be held, else any object."""
    return [_arguments(tool, number, wanted) for number, tool in enumerate(tools)]


def _arguments(tool: Tool, number: int, wanted: Wanted) -> str:
    schema = {**_held(tool, wanted), "x-guidance": _AS_JSON_IS_WRITTEN}
    return f"arguments_{number}: %json {json.dumps(schema, ensure_ascii=False)}"


def _held(tool: Tool, wanted: Wanted) -> dict[str, Any]:
    if not (wanted.required or tool.strict):
        return {"type": "object"}
    return closed(tool.parameters if tool.judged is None else tool.judged)


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The same schema, for objects with the named properties alone where it does not speak of others."""
    out = {"type": "object", **schema}
    if "properties" in schema and not any(key in schema for key in _COMPOSED):
        out.setdefault("additionalProperties", False)
    return out


def grammar(
    calls: Sequence[str],
    rules: Sequence[str],
    wanted: Wanted,
    begin: str,
    spelling: Spelling,
    *,
    untagged: Sequence[str] = (),
) -> str:
    """Answers of text and calls that begin with the tag `begin`. `calls`: each tool's call from behind that tag on.
    `untagged`: rules of calls that lack it, for answers of any text."""
    body = f"body: {' | '.join(f'call_{number}' for number in range(len(calls)))}"
    each = [f"call_{number}: {call}" for number, call in enumerate(calls)]
    tag = spelling(begin)
    more = f"(SPACES? {tag} body)*" if wanted.several else ""
    lines = [*each, *rules, body, r"SPACES: /[ \n]{1,4}/"]
    if wanted.required:
        return "\n".join([f"start: SPACES? {tag} body {more}", *lines])
    if wanted.content:
        return "\n".join([f"start: SPACES? {tag} body {more} | content", *lines, f"content: {wanted.content}"])
    or_untagged, but_untagged = (" | untagged", " & ~UNTAGGED") if untagged else ("", "")
    lines += untagged
    if not spelling.is_text(begin):
        text = rf"TEXT: /(.|\n)+/{but_untagged}"
        return "\n".join([f"start: TEXT? ({tag} body {more})?{or_untagged}", *lines, text])
    heads = f"HEAD: /(.|\\n)*{re.escape(begin).replace('/', chr(92) + '/')}/{but_untagged}"
    text = rf"TEXT: /(.|\n)*/{but_untagged}"
    return "\n".join([f"start: head body {more} | TEXT{or_untagged}", "head[lazy]: HEAD", heads, *lines, text])


def without_tag(tools: Sequence[Tool], wanted: Wanted, begins: Sequence[str]) -> list[str]:
    """A rule `untagged`: calls without their tag, held from behind their opening on, and a terminal `UNTAGGED` that is
    all text with such an opening. `begins`: a brace and fences, which stand around such calls."""
    names = [tool.name for tool in tools]
    ways, lines, opened = [], [], []
    for at, begin in enumerate(begins):
        firsts = []
        for number, tool in enumerate(tools):
            firsts.append(f'OPENING_{at}_{number} SPACES? arguments_{number} SPACES? "}}"')
            lines.append(f"OPENING_{at}_{number}: /{pattern(begin, with_arguments(begin, [tool.name]))}/")
            if _may_be_empty(_held(tool, wanted)):
                firsts.append(f"EMPTY_{at}_{number}")
                lines.append(f"EMPTY_{at}_{number}: /{pattern(begin, without_arguments(begin, [tool.name]))}/")
        lines.append(f"first_{at}: {' | '.join(firsts)}")
        ways.append(f"first_{at} {'again* ' if wanted.several else ''}SPACES?{' FENCE' if begin == FENCE else ''}")
        opened += [pattern(begin, opening) for opening in openings(begin, names)]
    if wanted.several:
        objects = [call_object(tool, number, "arguments") for number, tool in enumerate(tools)]
        lines.append(f"again: SPACES? ({' | '.join(objects)})")
    lines += [f"FENCE: {quoted(FENCE)}", rf"UNTAGGED: /({'|'.join(opened)})(.|\n)*/"]
    return [f"untagged: {' | '.join(ways)}", *lines]


def _may_be_empty(schema: Mapping[str, Any]) -> bool:
    """Is `{}` surely of this schema?"""
    return not schema.get("required") and schema.keys() <= _OF_PROPERTIES


def bare_grammar(
    calls: Sequence[str], rules: Sequence[str], wanted: Wanted, begin: str | None, spelling: Spelling
) -> str:
    """Answers that are one call, behind the tag `begin` or nothing, or, where none is required, text that begins
    otherwise."""
    each = [f"call_{number}: {call}" for number, call in enumerate(calls)]
    body = f"body: {' | '.join(f'call_{number}' for number in range(len(calls)))}"
    tag = f"{spelling(begin)}? " if begin else ""
    start = f"start: SPACES? {tag}body" + ("" if wanted.required else " | TEXT")
    text = [] if wanted.required else [r"TEXT: /([ \t\r\n]*[^ \t\r\n\[{`](.|\n)*)?/"]
    return "\n".join([start, *each, *rules, body, r"SPACES: /[ \n]{1,4}/", *text])
