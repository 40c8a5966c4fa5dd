"""Writes grammars of answers with calls in llguidance's dialect of Lark. Pure functions of text and schemas.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.tokenize.tools.form import Spelling, Tool, Wanted, quoted
from headrace.tokenize.tools.opening import pattern
from headrace.tokenize.tools.regions import FENCE

_COMPOSED = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "propertyNames", "minProperties")
"""Keywords beside which `properties` does not say all that an object may hold."""
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
    held = tool.parameters if tool.judged is None else tool.judged
    schema = closed(held) if wanted.required or tool.strict else {"type": "object"}
    return f"arguments_{number}: %json {json.dumps({**schema, 'x-guidance': _AS_JSON_IS_WRITTEN}, ensure_ascii=False)}"


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
    several = "(SPACES? again)*" if wanted.several else ""
    lines, all_of_them, names = [], [], [tool.name for tool in tools]
    for at, begin in enumerate(begins):
        end = 'SPACES? "```"' if begin == FENCE else "SPACES?"
        all_of_them.append(f"first_{at} {several} {end}")
        lines.append(f"first_{at}: {' | '.join(f'first_{at}_{number}' for number in range(len(tools)))}")
        for number, name in enumerate(names):
            lines.append(f'first_{at}_{number}: OPENING_{at}_{number} SPACES? arguments_{number} SPACES? "}}"')
            lines.append(f"OPENING_{at}_{number}: /{pattern(begin, [name])}/")
    if wanted.several:
        lines.append(f"again: {' | '.join(f'again_{number}' for number in range(len(tools)))}")
        lines += [f"again_{number}: {call_object(tool, number, 'arguments')}" for number, tool in enumerate(tools)]
    openings = "|".join(pattern(begin, names) for begin in begins)
    return [f"untagged: {' | '.join(all_of_them)}", *lines, rf"UNTAGGED: /({openings})(.|\n)*/"]


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
