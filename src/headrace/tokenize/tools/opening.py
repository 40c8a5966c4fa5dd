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


def with_arguments(begin: str, names: Collection[str]) -> Opening:
    """`{"name": "f", "arguments":`, at the brace or behind the fence `begin`, for functions of these names.

    An object that says so much means a call. One that says anything else first (another key, another order, a key
    written with escapes) is text, for which function it means shows too late or never."""
    return [*_named(begin, names), [","], [f'"{key}"' for key in ARGUMENTS], [":"]]


def without_arguments(begin: str, names: Collection[str]) -> Opening:
    """`{"name": "f"}`, a whole call."""
    return [*_named(begin, names), ["}"]]


def openings(begin: str, names: Collection[str]) -> list[Opening]:
    """Both."""
    return [with_arguments(begin, names), without_arguments(begin, names)]


def _named(begin: str, names: Collection[str]) -> Opening:
    line = [[f"{language}\n" for language in LANGUAGES]] if begin == FENCE else []
    return [*line, ["{"], ['"name"'], [":"], [quoted(name) for name in names]]


def pattern(begin: str, opening: Opening) -> str:
    """The same as a regular expression between slashes, from the beginning of an answer on."""
    blanks = r"[ \t\r\n]*"
    each = (f"({'|'.join(map(_literal, part))})" for part in opening)
    return f"{blanks}{begin if begin == FENCE else ''}{blanks.join(each)}"


def _literal(text: str) -> str:
    return "\\n".join(map(re.escape, text.split("\n"))).replace("/", "\\/")


class Opened:
    """A region that begins with one of some openings. What begins otherwise is BAD as soon as that shows."""

    def __init__(self, region: Region, openings: Collection[Opening]) -> None:
        self._region = region
        self._openings = list(openings)
        """Those that it may still be; none once it is one."""
        self._at = 0
        self._part = ""
        """What came of the part that is being read."""
        self._symbols: list[str] = []
        """What came so far."""

    def feed(self, symbol: str) -> Step:
        if not self._openings:
            return self._region.feed(symbol)
        self._symbols.append(symbol)
        if self._at and not self._part and symbol in SPACE:
            return Step.MORE
        self._part += symbol
        self._openings = [o for o in self._openings if any(one.startswith(self._part) for one in o[self._at])]
        if not self._openings:
            return Step.BAD
        if any(self._part in opening[self._at] for opening in self._openings):
            self._at, self._part = self._at + 1, ""
        if all(self._at < len(opening) for opening in self._openings):
            return Step.MORE
        self._openings = []
        steps = [self._region.feed(each) for each in self._symbols]
        return steps[-1]
