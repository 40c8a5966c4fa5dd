"""Mistral: `[TOOL_CALLS]`, then a list of objects (to Small 3.1), or name, `[ARGS]` and arguments (from Small 3.2 on).

https://docs.mistral.ai/guides/tokenization/ and mistral-common's tokenizers v3 to v13. Templates take ids of nine
letters and digits.
"""

from __future__ import annotations

import hashlib
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
_ALPHABET = string.digits + string.ascii_letters
_ID_CHARS = 9
_ID = f"[a-zA-Z0-9]{{{_ID_CHARS}}}"


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
    return _spelled(secrets.randbits(256))


def fit_id(given: str) -> str:
    """An id as the templates take it, the same for the same id: a call and its result stay together."""
    if re.fullmatch(_ID, given):
        return given
    return _spelled(int.from_bytes(hashlib.sha256(given.encode("utf-8", "replace")).digest(), "big"))


def _spelled(number: int) -> str:
    chars = []
    for _ in range(_ID_CHARS):
        number, digit = divmod(number, len(_ALPHABET))
        chars.append(_ALPHABET[digit])
    return "".join(chars)


def _list_grammar(tools: Sequence[Tool], wanted: Wanted, spelling: Spelling) -> str:
    items = [f"item_{number}: {lark.call_object(tool, number, 'arguments')}" for number, tool in enumerate(tools)]
    item = f"item: {' | '.join(f'item_{number}' for number in range(len(tools)))}"
    more = '(", " item)*' if wanted.several else ""
    one_list = replace(wanted, several=False)
    rules = [*items, *lark.arguments(tools, wanted), item]
    return lark.grammar([f'" "? "[" item {more} "]"'], rules, one_list, BEGIN, spelling)


def _named_grammar(tools: Sequence[Tool], wanted: Wanted, spelling: Spelling) -> str:
    calls = []
    for number, tool in enumerate(tools):
        an_id = f"({spelling(CALL_ID)} /{_ID}/)? "
        calls.append(f"{quoted(tool.name)} {an_id}{spelling(ARGS)} arguments_{number}")
    return lark.grammar(calls, lark.arguments(tools, wanted), wanted, BEGIN, spelling)


MISTRAL_LIST = Form(
    "mistral list",
    _region,
    _list_grammar,
    begins=frozenset({BEGIN}),
    inner=frozenset({ARGS, CALL_ID}),
    new_id=new_id,
    fit_id=fit_id,
)
MISTRAL_NAMED = replace(MISTRAL_LIST, name="mistral named", grammar=_named_grammar)
