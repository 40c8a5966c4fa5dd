"""Hermes and Qwen: `<tool_call>`, an object with name and arguments, `</tool_call>`; as many as there are calls.

NousResearch, Hermes-Function-Calling (https://github.com/NousResearch/Hermes-Function-Calling); the same in Qwen 2.5,
Qwen 3 and models that are tuned after them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.tokenize.tools import lark
from headrace.tokenize.tools.calls import Calls
from headrace.tokenize.tools.form import Described, Form, Spelling, Tool, Wanted, quoted
from headrace.tokenize.tools.regions import FENCE, Objects, fenced

BEGIN, END = "<tool_call>", "</tool_call>"


def _region(begin: str, calls: Calls) -> Objects:
    if begin == FENCE:
        return fenced(calls)
    return Objects(calls, {END} if begin == BEGIN else ())


def _grammar(tools: Sequence[Tool], wanted: Wanted, spelling: Spelling) -> str:
    line_end = quoted("\n")
    objects = [lark.call_object(tool, number, "arguments") for number, tool in enumerate(tools)]
    calls = [f"{line_end} {one} {line_end} {spelling(END)}" for one in objects]
    untagged = lark.without_tag(tools, wanted, _LOOSE)
    return lark.grammar(calls, lark.arguments(tools, wanted), wanted, BEGIN, spelling, untagged=untagged)


_LOOSE = ("{", FENCE)
"""Small models, and those for code, leave the tags out or put a fence in their place."""

HERMES = Form("hermes", _region, _grammar, begins=frozenset({BEGIN}), ends=frozenset({END}), loose=frozenset(_LOOSE))


def _tools(tools: Sequence[Mapping[str, Any]]) -> str:
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You can call these functions, each described by a JSON schema:\n"
        f"<tools>\n{lines}\n</tools>\n"
        "To call one, answer with a JSON object between tags, one pair of tags for each call:\n"
        f'{BEGIN}\n{{"name": "the function\'s name", "arguments": {{"its": "arguments"}}}}\n{END}'
    )


def _calls(calls: Sequence[Mapping[str, Any]]) -> str:
    written = [json.dumps({"name": c["name"], "arguments": c["arguments"]}, ensure_ascii=False) for c in calls]
    return "\n".join(f"{BEGIN}\n{call}\n{END}" for call in written)


def _results(results: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"<tool_response>\n{text}\n</tool_response>" for _, text in results)


DESCRIBED_HERMES = Form(
    "described hermes",
    _region,
    _grammar,
    begins=frozenset({BEGIN}),
    ends=frozenset({END}),
    loose=frozenset(_LOOSE),
    described=Described(_tools, _calls, _results),
)
"""For templates that know no tools."""
