"""Regular expressions as text: brought into one dialect, and weighed before anybody compiles them. Pure functions.

JSON Schema's `pattern` is ECMAScript's; whoever checks an answer may use Python or another engine. What they understand
differently is narrowed to what all of them match, or refused.
"""

from __future__ import annotations

import re

from headrace.errors import RequestError

WEIGHT = 20_000
"""So many characters may be counted out, `(a{100}){100}` being 10,000: no lexeme that was seen needs more than a tenth
of a second for a mask below it."""

_SPACE = r"\t\n\x0b\x0c\r "
_WIDE_SPACE = r"\s\x1c-\x1f\x{85}\x{a0}\x{feff}"
_WIDE_WORD = r"\p{L}\p{M}\p{N}\p{Pc}\p{Alphabetic}"
_NARROW = {
    "d": "0-9",
    "w": "0-9A-Za-z_",
    "s": _SPACE,
    "D": r"[^\p{Nd}]",
    "W": f"[^{_WIDE_WORD}]",
    "S": f"[^{_WIDE_SPACE}]",
}
"""What every dialect takes for such a class, to stand inside brackets."""
_WIDE = {
    "d": r"\p{Nd}",
    "w": _WIDE_WORD,
    "s": _WIDE_SPACE,
    "D": "[^0-9]",
    "W": "[^0-9A-Za-z_]",
    "S": f"[^{_SPACE}]",
}
"""What any dialect takes for it: to stand inside brackets that are negated."""

_COUNT = re.compile(r"\{([0-9]+)(,([0-9]*))?\}")
_SPECIAL = set(r"\^$.|?*+()[]{}&~-#")
_BARE = {"t": r"\t", "n": r"\n", "r": r"\r", "f": r"\x0c", "v": r"\x0b", "0": r"\x00"}
_LOOKS = ("=", "!", "<=", "<!")


class PatternError(Exception):
    """A pattern that cannot be honoured. The message is for its client."""


def portable(pattern: str) -> str:
    """The same for the library, matching nothing that another engine does not match. PatternError."""
    return _Reader(pattern).read()


def bounded(regex: str, at: str) -> None:
    """RequestError for `at` where a regular expression counts out too much to be compiled for a stranger."""
    if weight(regex) > WEIGHT:
        raise RequestError(f"the regex grammar counts out more than {WEIGHT} characters", at)


def weight(regex: str) -> int:
    """How many characters it counts out, in any dialect; what is no regular expression weighs something, too."""
    sums, last, at = [0], 0, 0

    def add(atom: int) -> None:
        nonlocal last
        sums[-1] += last
        last = atom

    while at < len(regex):
        char = regex[at]
        count = _COUNT.match(regex, at) if char == "{" else None
        if char == "\\":
            add(1)
            at = _behind_escape(regex, at)
            continue
        if char == "[":
            add(1)
            at = _behind_class(regex, at)
            continue
        if count is not None:
            last = min(last * max(int(count[1][:9]), int((count[3] or "0")[:9]), 1), 10**18)
            at = count.end()
            continue
        if char == "(":
            add(0)
            sums.append(0)
        elif char == ")" and len(sums) > 1:
            add(0)
            last = sums.pop()
        elif char not in "*+?|":
            add(1)
        at += 1
    return min(sum(sums) + last, 10**18)


def _behind_escape(regex: str, at: int) -> int:
    end = at + 2
    if regex[at + 1 : end] in ("p", "P", "x", "u", "U") and regex[end : end + 1] == "{":
        end = (regex.find("}", end) + 1) or len(regex)
    return end


def _behind_class(regex: str, at: int) -> int:
    depth = 0
    while at < len(regex):
        char = regex[at]
        if char == "\\":
            at = _behind_escape(regex, at)
            continue
        if char == "[":
            depth += 1
            at += 2 if regex[at + 1 : at + 2] == "^" else 1
            if regex[at : at + 1] == "]":  # a bracket that stands first stands for itself
                at += 1
            continue
        at += 1
        if char == "]":
            depth -= 1
            if not depth:
                break
    return at


class _Reader:
    """Reads one pattern from left to right."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0

    def read(self) -> str:
        out, atom = [], False  # may a quantifier stand here?
        while self._at < len(self._text):
            char = self._next()
            if char in "*+?" or (char == "{" and _COUNT.match(self._text, self._at - 1)):
                if not atom:
                    raise PatternError(f"nothing stands before {char!r} that could be repeated")
                out.append(self._quantifier(char))
                atom = False
                continue
            atom = char not in "(|^$"
            out.append(self._piece(char))
        return "".join(out)

    def _next(self) -> str:
        char = self._text[self._at : self._at + 1]
        if not char:
            raise PatternError("it ends in the middle")
        self._at += 1
        return char

    def _quantifier(self, char: str) -> str:
        if char == "{":
            found = _COUNT.match(self._text, self._at - 1)
            assert found is not None
            self._at, char = found.end(), found[0]
        after = self._text[self._at : self._at + 1]
        if after == "?":  # which match is found first makes no difference
            self._at += 1
        elif after == "+":
            raise PatternError("possessive repetition is not supported")
        return char

    def _piece(self, char: str) -> str:
        if char == "\\":
            inside = self._escape(_NARROW)
            return f"[{inside}]" if len(inside) > 1 and inside[0] != "[" else inside
        if char == "[":
            return self._class()
        if char == "(":
            return self._group()
        if char == ".":
            return r"[^\n\r\x{2028}\x{2029}]"
        if char in "{}]":
            if self._text.startswith(",", self._at) and char == "{":
                raise PatternError("{,n} is understood differently by different engines: write {0,n}")
            return f"\\{char}"
        return char if char in "^$|)" else _literal(char)

    def _group(self) -> str:
        if not self._text.startswith("?", self._at):
            return "(?:"
        rest = self._text[self._at + 1 :]
        if rest.startswith(_LOOKS):
            raise PatternError("look-around is not supported")
        named = re.match(r"P?<[A-Za-z_][A-Za-z_0-9]*>|:", rest)
        if named is None:
            raise PatternError(f"the group (?{rest[:8]} is not one that every engine knows")
        self._at += 1 + named.end()
        return "(?:"

    def _class(self) -> str:
        negated = self._text.startswith("^", self._at)
        self._at += negated
        if self._text.startswith("]", self._at):
            raise PatternError("an empty class, or a class that begins with ], is understood differently: write \\]")
        table, low = (_WIDE if negated else _NARROW), ""
        parts: list[str] = []
        while (char := self._next()) != "]":
            dash = char == "-" and low and not self._text.startswith("]", self._at)
            one = self._escape(table) if char == "\\" else _literal(char)
            if dash:
                char = self._next()
                high = self._escape(table) if char == "\\" else _literal(char)
                if _single(high):
                    parts[-1] = f"{low}-{high}"
                else:
                    parts += [r"\-", high]
                low = ""
                continue
            parts.append(one)
            low = one if _single(one) else ""
        return f"[{'^' if negated else ''}{''.join(parts)}]"

    def _escape(self, table: dict[str, str]) -> str:
        """What stands for it inside brackets."""
        char = self._next()
        if char in table:
            return table[char]
        if char in _BARE:
            if char == "0" and self._text[self._at : self._at + 1].isdigit():
                raise PatternError("octal escapes are not supported")
            return _BARE[char]
        if char in "pP":
            found = re.compile(r"\{[A-Za-z_=]+\}").match(self._text, self._at)
            if found is None:
                raise PatternError(f"\\{char} must be followed by a class in braces, as in \\{char}{{L}}")
            self._at = found.end()
            return f"\\{char}{found[0]}"
        if char in "xu":
            return self._code(2 if char == "x" else 4)
        if char in "bB":
            raise PatternError("word boundaries are look-around, which is not supported")
        if char.isdigit() or char == "k":
            raise PatternError("back-references are not supported")
        if char.isalpha():
            raise PatternError(f"the escape \\{char} is not one that every engine knows")
        return _literal(char)

    def _code(self, digits: int) -> str:
        found = re.compile(rf"[0-9a-fA-F]{{{digits}}}").match(self._text, self._at)
        if found is None:
            raise PatternError(f"{digits} hexadecimal digits must stand behind the escape")
        self._at = found.end()
        if 0xD800 <= int(found[0], 16) < 0xE000:
            raise PatternError("write characters beyond U+FFFF as they are, and not as two escapes")
        return f"\\x{{{int(found[0], 16):x}}}"


def _literal(char: str) -> str:
    return f"\\{char}" if char in _SPECIAL else char


def _single(one: str) -> bool:
    """Is it one character, not a class?"""
    return (
        len(one) == 1
        or (one[0] == "\\" and len(one) == 2 and not one[1].isalnum())
        or one[:2] == "\\x"
        or one in (*_BARE.values(),)
    )
