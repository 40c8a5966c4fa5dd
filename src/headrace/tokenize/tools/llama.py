"""Llama 3.1 to 3.3: an answer that is an object with name and parameters, maybe behind `<|python_tag|>`; one a turn.

https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/. The templates take back only one call a turn.
Models that write several put `;` between them.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.tokenize.tools import lark
from headrace.tokenize.tools.calls import Calls
from headrace.tokenize.tools.form import Form, Spelling, Tool, Wanted
from headrace.tokenize.tools.regions import Objects

BEGIN = "<|python_tag|>"


def _region(begin: str, calls: Calls) -> Objects:
    return Objects(calls)


def _grammar(tools: Sequence[Tool], wanted: Wanted, spelling: Spelling) -> str:
    calls = [lark.call_object(tool, number, "parameters") for number, tool in enumerate(tools)]
    begin = None if spelling.is_text(BEGIN) else BEGIN
    return lark.bare_grammar(calls, lark.arguments(tools, wanted), wanted, begin, spelling)


LLAMA = Form("llama", _region, _grammar, begins=frozenset({BEGIN}), firsts=frozenset({"{"}), single=True)
