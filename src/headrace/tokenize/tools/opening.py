"""How a call begins that lacks its tag, where a grammar holds the answer: one definition for the grammar, which holds
what follows, and for the reader, which tells it as a call. Knows no schema.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from headrace.tokenize.tools.form import quoted
from headrace.tokenize.tools.regions import FENCE, LANGUAGES
from headrace.tokenize.tools.steps import ARGUMENTS, SPACE, Region, Step

Opening = Sequence[Sequence[str]]
"""One of each, in order; spaces may stand between them. Of those beside each other none is another's beginning."""


def opening(begin: str, names: Collection[str]) -> Opening:
    """`{"name": "f", "arguments":`, at the brace or behind the fence `begin`, for functions of these names.

    An object that says so much means a call; one that says anything else first (no other key, no other order, no key
    written with escapes) is text, for which names it means cannot be known."""
    line = [[f"{language}\n" for language in LANGUAGES]] if begin == FENCE else []
    keys = [f'"{key}"' for key in ARGUMENTS]
    return [*line, ["{"], ['"name"'], [":"], [quoted(name) for name in names], [","], keys, [":"]]


def pattern(begin: str, names: Collection[str]) -> str:
    """The same as a regular expression between slashes, from the beginning of an answer on."""
    each = ["|".join(map(_literal, part)) for part in opening(begin, names)]
    blanks = r"[ \t\r\n]*"
    return f"{blanks}{begin if begin == FENCE else ''}{blanks.join(f'({part})' for part in each)}"


def _literal(text: str) -> str:
    return "\\n".join(map(re.escape, text.split("\n"))).replace("/", "\\/")


class Opened:
    """A region that begins with an opening. What begins otherwise is BAD as soon as that shows."""

    def __init__(self, region: Region, parts: Opening) -> None:
        self._region = region
        self._parts = parts
        self._at = 0
        self._part = ""
        """What came of the part that is being read."""
        self._symbols: list[str] = []
        """What came so far."""

    def feed(self, symbol: str) -> Step:
        if self._at == len(self._parts):
            return self._region.feed(symbol)
        self._symbols.append(symbol)
        if self._at and not self._part and symbol in SPACE:
            return Step.MORE
        self._part += symbol
        here = self._parts[self._at]
        if self._part not in here:
            return Step.MORE if any(part.startswith(self._part) for part in here) else Step.BAD
        self._at, self._part = self._at + 1, ""
        if self._at < len(self._parts):
            return Step.MORE
        steps = [self._region.feed(each) for each in self._symbols]
        return steps[-1]
