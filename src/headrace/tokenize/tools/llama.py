"""Llama 3.1 to 3.3: an answer that is an object with name and parameters, maybe behind `<|python_tag|>`; one a turn.

https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/. The templates take back only one call a turn.
Models that write several put `;` between them.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.tokenize.tools import lark
from headrace.tokenize.tools.calls import Calls
from headrace.tokenize.tools.form import Form, Spelling, Tool, Wanted, quoted
from headrace.tokenize.tools.regions import Objects

BEGIN = "<|python_tag|>"


def _region(begin: str, calls: Calls) -> Objects:
    return Objects(calls)


def _grammar(tools: Sequence[Tool], wanted: Wanted, spelling: Spelling) -> str:
    calls = []
    for number, tool in enumerate(tools):
        head = quoted(f'{{"name": {quoted(tool.name)}, "parameters": ')
        calls.append(f'{head} arguments_{number} "}}"')
    rules = [lark.arguments(tool, number, wanted) for number, tool in enumerate(tools)]
    return lark.bare_grammar(calls, rules, wanted, None if spelling.is_text(BEGIN) else BEGIN, spelling)


LLAMA = Form("llama", _region, _grammar, begins=frozenset({BEGIN}), firsts=frozenset({"{"}), single=True)
