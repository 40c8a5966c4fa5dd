"""Mistral: `[TOOL_CALLS]`, then a list of objects (to Small 3.1), or name, `[ARGS]` and arguments (from Small 3.2 on).

https://docs.mistral.ai/guides/tokenization/ and mistral-common's tokenizers v3 to v13. Templates take ids of nine
letters and digits.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Sequence
from dataclasses import replace

from headrace.tokenize.tools import lark
from headrace.tokenize.tools.calls import Calls
from headrace.tokenize.tools.form import Form, Spelling, Tool, Wanted, quoted
from headrace.tokenize.tools.regions import Named, Objects
from headrace.tokenize.tools.steps import SPACE, Region, Step

BEGIN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ALPHABET = string.ascii_letters + string.digits
_ID_CHARS = 9


class _Either:
    """Which of the two it is shows at its first character."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._region: Region | None = None

    def feed(self, symbol: str) -> Step:
        if self._region is None:
            if symbol in SPACE:
                return Step.MORE
            if symbol in ("[", "{"):
                self._region = Objects(self._calls)
            else:
                self._region = Named(self._calls, {ARGS}, skips={CALL_ID}, next_ones={BEGIN})
        return self._region.feed(symbol)


def _region(begin: str, calls: Calls) -> _Either:
    return _Either(calls)


def new_id() -> str:
    """As the templates take them."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(_ID_CHARS))


def _list_grammar(tools: Sequence[Tool], wanted: Wanted, spelling: Spelling) -> str:
    items = []
    for number, tool in enumerate(tools):
        head = quoted(f'{{"name": {quoted(tool.name)}, "arguments": ')
        items.append(f'item_{number}: {head} arguments_{number} "}}"')
    rules = [lark.arguments(tool, number, wanted) for number, tool in enumerate(tools)]
    item = f"item: {' | '.join(f'item_{number}' for number in range(len(tools)))}"
    more = '(", " item)*' if wanted.several else ""
    one_list = replace(wanted, several=False)
    return lark.grammar([f'" "? "[" item {more} "]"'], [*items, *rules, item], one_list, BEGIN, spelling)


def _named_grammar(tools: Sequence[Tool], wanted: Wanted, spelling: Spelling) -> str:
    calls = []
    for number, tool in enumerate(tools):
        an_id = f"({spelling(CALL_ID)} /[a-zA-Z0-9]{{9}}/)? "
        calls.append(f"{quoted(tool.name)} {an_id}{spelling(ARGS)} arguments_{number}")
    rules = [lark.arguments(tool, number, wanted) for number, tool in enumerate(tools)]
    return lark.grammar(calls, rules, wanted, BEGIN, spelling)


MISTRAL_LIST = Form(
    "mistral list",
    _region,
    _list_grammar,
    begins=frozenset({BEGIN}),
    inner=frozenset({ARGS, CALL_ID}),
    new_id=new_id,
    good_id=re.compile(r"[a-zA-Z0-9]{9}"),
)
MISTRAL_NAMED = Form(
    "mistral named",
    _region,
    _named_grammar,
    begins=frozenset({BEGIN}),
    inner=frozenset({ARGS, CALL_ID}),
    new_id=new_id,
    good_id=re.compile(r"[a-zA-Z0-9]{9}"),
)
