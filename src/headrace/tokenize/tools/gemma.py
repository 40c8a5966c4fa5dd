"""Gemma: FunctionGemma and Gemma 4 write `call:name{key:value}` between tags of their own; Gemma 2 and 3 know no tools,
and are shown the form that their makers' guide suggests: an object with name and parameters.

https://ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices,
https://ai.google.dev/gemma/docs/capabilities/function-calling
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.tokenize.tools import lark
from headrace.tokenize.tools.calls import Calls
from headrace.tokenize.tools.form import Described, Form, Spelling, Tool, Wanted
from headrace.tokenize.tools.keyed import keyed_grammar
from headrace.tokenize.tools.regions import FENCE, Keyed, Objects, fenced


def _keyed(name: str, begin: str, end: str, quote: str) -> Form:
    def region(tag: str, calls: Calls) -> Keyed:
        return Keyed(calls, quote, {end})

    def grammar(tools: Sequence[Tool], wanted: Wanted, spelling: Spelling) -> str:
        return keyed_grammar(tools, wanted, spelling, begin, end, quote)

    return Form(name, region, grammar, begins=frozenset({begin}), ends=frozenset({end}), inner=frozenset({quote}))


FUNCTION_GEMMA = _keyed("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>")
GEMMA_4 = _keyed("gemma 4", "<|tool_call>", "<tool_call|>", '<|"|>')


def _region(begin: str, calls: Calls) -> Objects:
    return fenced(calls) if begin == FENCE else Objects(calls)


def _grammar(tools: Sequence[Tool], wanted: Wanted, spelling: Spelling) -> str:
    calls = [lark.call_object(tool, number, "parameters") for number, tool in enumerate(tools)]
    return lark.bare_grammar(calls, lark.arguments(tools, wanted), wanted, None, spelling)


def _tools(tools: Sequence[Mapping[str, Any]]) -> str:
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        "You have access to these functions, each described by a JSON schema:\n"
        f"{lines}\n"
        "To call one, answer with nothing but a JSON object in the form "
        '{"name": the function\'s name, "parameters": an object of its arguments}.'
    )


def _calls(calls: Sequence[Mapping[str, Any]]) -> str:
    written = [{"name": call["name"], "parameters": call["arguments"]} for call in calls]
    return "\n".join(json.dumps(call, ensure_ascii=False) for call in written)


def _results(results: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"Result of {name}:\n{text}" if name else f"Result:\n{text}" for name, text in results)


DESCRIBED_GEMMA = Form(
    "described gemma",
    _region,
    _grammar,
    begins=frozenset(),
    ends=frozenset({FENCE}),
    firsts=frozenset({"{", "[", FENCE}),
    single=True,
    described=Described(_tools, _calls, _results, in_first_message=True),
)
"""For Gemma's templates that know no tools."""
