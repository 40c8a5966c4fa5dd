"""Reads JSON as it comes in, character by character: where a value ends, and an object that is a tool call.

Only structure is judged (quotes, brackets, keys of the call itself); what stands in the arguments is the model's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

from headrace.tokenize.tools.calls import Calls

SPACE = " \t\r\n"
_LITERAL = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_CLOSES = {"{": "}", "[": "]"}
ARGUMENTS = ("arguments", "parameters")
_ASIDE = ("type", "id")
"""Keys that models put beside name and arguments, and that say nothing more."""


class Step(Enum):
    """What became of a symbol that was offered."""

    MORE = "taken, and more may follow"
    OVER = "taken, and it was the last"
    UNREAD = "not taken: what came before was all"
    BAD = "not taken: this is not what it looked like"


class Region(Protocol):
    """Reads the part of an answer that holds calls, from behind what begins it."""

    def feed(self, symbol: str) -> Step:
        """Take a character or a whole tag. Once a call is open, never BAD: what cannot be read is then arguments."""


class Value:
    """Finds the end of one JSON value. The first character must not be a space."""

    def __init__(self) -> None:
        self._open: list[str] = []
        """What closes the brackets that are open, innermost last."""
        self._in_string = self._escaped = self._in_literal = False

    def feed(self, char: str) -> Step:
        if self._in_string:
            return self._string(char)
        if self._in_literal:
            if char in _LITERAL:
                return Step.MORE
            self._in_literal = False
            if not self._open:
                return Step.UNREAD
        if char in _CLOSES:
            self._open.append(_CLOSES[char])
        elif char in "}]":
            if not self._open or self._open[-1] != char:
                return Step.BAD
            self._open.pop()
            return Step.MORE if self._open else Step.OVER
        elif char == '"':
            self._in_string = True
        elif char in _LITERAL:
            self._in_literal = True
        elif not self._open or char not in SPACE + ",:":
            return Step.BAD
        return Step.MORE

    def _string(self, char: str) -> Step:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            return Step.MORE if self._open else Step.OVER
        return Step.MORE


class CallObject:
    """One `{"name": ..., "arguments": {...}}`, from its brace on; the keys in any order, `parameters` too.

    The call begins when its name and the first character of its arguments are known; the arguments are told as they
    come. UNREAD: the object lacks its end, but the call is whole.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._state: Callable[[str], Step] = self._first_key
        self._key = ""
        self._text = ""
        self._value = Value()
        self._name: str | None = None
        self._arguments: str | None = None
        """What came of them before the call could begin."""
        self._told = False

    def feed(self, char: str) -> Step:
        """BAD also where the call is open: then its arguments cannot be read."""
        return self._state(char)

    def _first_key(self, char: str) -> Step:
        if char == "}":
            return self._close()
        return self._next_key(char)

    def _next_key(self, char: str) -> Step:
        if char in SPACE:
            return Step.MORE
        return self._begin_string(char, self._in_key)

    def _in_key(self, char: str) -> Step:
        self._text += char
        if self._value.feed(char) is Step.OVER:
            self._key = decoded(self._text) or ""
            self._state = self._colon
        return Step.MORE

    def _colon(self, char: str) -> Step:
        if char in SPACE:
            return Step.MORE
        if char != ":":
            return self._stop()
        if self._key in ARGUMENTS:
            if self._arguments is not None:
                return self._stop()
            self._state = self._begin_arguments
        elif self._key == "name" and self._name is None:
            self._state = self._begin_name
        elif self._key in _ASIDE or self._told:
            self._state = self._begin_aside
        else:
            return self._stop()
        return Step.MORE

    def _begin_name(self, char: str) -> Step:
        if char in SPACE:
            return Step.MORE
        return self._begin_string(char, self._in_name)

    def _begin_string(self, char: str, inside: Callable[[str], Step]) -> Step:
        if char != '"':
            return self._stop()
        self._text, self._value, self._state = char, Value(), inside
        self._value.feed(char)
        return Step.MORE

    def _in_name(self, char: str) -> Step:
        self._text += char
        if self._value.feed(char) is Step.OVER:
            self._name = decoded(self._text)
            if self._name is None or not self._calls.takes(self._name):
                return Step.BAD
            if self._arguments is not None:
                self._tell()
            self._state = self._after
        return Step.MORE

    def _begin_arguments(self, char: str) -> Step:
        if char in SPACE:
            return Step.MORE
        self._value = Value()
        if char == "{":
            self._state = self._in_arguments
            self._arguments = ""
            if self._name is not None:
                self._tell()
            return self._in_arguments(char)
        if char not in '"n':
            return self._stop()
        self._text, self._state = "", self._in_other_arguments
        return self._in_other_arguments(char)

    def _in_arguments(self, char: str) -> Step:
        step = self._value.feed(char)
        if step is Step.BAD:
            return step
        if self._told:
            self._calls.add(char)
        else:
            self._arguments = (self._arguments or "") + char
        if step is Step.OVER:
            self._state = self._after
        return Step.MORE

    def _in_other_arguments(self, char: str) -> Step:
        """An object written out in a string, or null for none."""
        step = self._value.feed(char)
        if step is not Step.UNREAD:
            self._text += char
        if step is Step.MORE:
            return step
        text = "{}" if self._text == "null" else decoded(self._text) if step is Step.OVER else None
        if text is not None and not text.strip():
            text = "{}"
        if text is None or not is_object(text):
            return self._stop()
        self._arguments, self._state = text.strip(), self._after
        if self._name is not None:
            self._tell()
        return Step.MORE if step is Step.OVER else self._after(char)

    def _begin_aside(self, char: str) -> Step:
        if char in SPACE:
            return Step.MORE
        self._value, self._state = Value(), self._in_aside
        return self._in_aside(char)

    def _in_aside(self, char: str) -> Step:
        step = self._value.feed(char)
        if step is Step.BAD:
            return self._stop()
        if step is Step.UNREAD:
            return self._after(char)
        if step is Step.OVER:
            self._state = self._after
        return Step.MORE

    def _after(self, char: str) -> Step:
        self._state = self._after
        if char in SPACE:
            return Step.MORE
        if char == ",":
            self._state = self._next_key
            return Step.MORE
        return self._close() if char == "}" else self._stop()

    def _tell(self) -> None:
        assert self._name is not None
        self._calls.begin(self._name)
        if self._arguments:
            self._calls.add(self._arguments)
        self._told = True

    def _close(self) -> Step:
        if not self._told:
            if self._name is None:
                return Step.BAD
            self._arguments = "{}"
            self._tell()
        self._calls.end()
        return Step.OVER

    def _stop(self) -> Step:
        """At something that an object does not go on with."""
        if not self._told:
            return Step.BAD
        self._calls.end()
        return Step.UNREAD


def decoded(quoted: str) -> str | None:
    """The text of a JSON string; None where it is none."""
    try:
        value: Any = json.loads(quoted, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def is_object(text: str) -> bool:
    """Is it a JSON object?"""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
