"""Grammars by llguidance, behind `Constraint`: the only module that knows its matchers."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from headrace.constrain.constraint import ConstraintError, Words

LIMITS = LLParserLimits(verbose_errors=False)
"""The library's own fuel for lexer and parser. What holds compiling and masks within bounds is judged before it sees a
grammar: `schema`, `patterns`, `lark`."""

REASON = 300
"""Longest reason that is passed on, in characters."""

PLACE = re.compile(r"\Aline [0-9]+, column [0-9]+: ")
"""How a reason begins that names a place in the grammar."""
_PLACE = re.compile(r"(?:at )?([0-9]+)\(([0-9]+)\): ")
_COPY = re.compile(r"\n +[0-9]+ \| ")
_FOUND = re.compile(r"'[^']*' \(at (\".*\") \('[^']*'\)\)$")


class Vocabulary(Protocol):
    """What is needed of a tokenizer: `tokenize.tokenizer.Tokenizer`."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def special_ids(self) -> Collection[int]: ...
    def piece(self, token: int) -> bytes: ...
    def encode(self, text: str, *, parse_special: bool, add_bos: bool) -> list[int]: ...


class _Tokens:
    """A vocabulary as the library asks for it."""

    def __init__(self, vocabulary: Vocabulary, width: int, eos: int) -> None:
        self._encode: Callable[..., list[int]] = vocabulary.encode
        self.tokens = [vocabulary.piece(token) for token in range(width)]
        self.special_token_ids = sorted(vocabulary.special_ids)
        self.eos_token_id = eos
        self.bos_token_id = None

    def __call__(self, text: str | bytes) -> Sequence[int]:
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._encode(plain, parse_special=False, add_bos=False)


def library_tokenizer(vocabulary: Vocabulary, width: int, eos: Collection[int]) -> LLTokenizer:
    """Takes some tenths of a second. `width` is that of the logits: masks have bits for ids that are no tokens, too;
    their bytes are empty, and no grammar allows them."""
    ends = sorted(eos) or [0]  # the library wants one; which tokens end an answer is decided outside
    return LLTokenizer(TokenizerWrapper(_Tokens(vocabulary, width, ends[0])), eos_token=ends)


class Guided:
    """`Constraint` of a grammar. A copy knows nothing of what became of its original."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @classmethod
    def of(cls, tokenizer: LLTokenizer, grammar: str) -> Guided:
        """From the library's own form of a grammar. ConstraintError where it is none, or nothing satisfies it."""
        guided = cls(LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS))
        line = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
        guided.fill(line)  # much of what can be wrong shows only here, or with the first token
        word = int(line.argmax())
        if line[word]:
            first = guided.copy()
            first.take(32 * word + int(line[word]).bit_length() - 1)
            first.fill(line)
        elif not guided.accepting:
            raise ConstraintError("nothing satisfies it")
        return guided

    def copy(self) -> Guided:
        return Guided(self._matcher.deep_copy())

    @property
    def accepting(self) -> bool:
        return self._matcher.is_accepting() and not self._matcher.is_error()

    @property
    def done(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def fill(self, line: Words) -> None:
        if not self._matcher.is_error():
            if self._matcher.is_stopped():
                line[:] = 0
                return
            self._matcher.unsafe_compute_mask_ptr(line.ctypes.data, line.nbytes)
        if self._matcher.is_error():
            raise ConstraintError(reason(self._matcher.get_error()))

    def take(self, token: int) -> None:
        self._matcher.consume_token(token)

    def rollback(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)


def reason(error: str) -> str:
    """The library's words on one line, the cause first, without its copy of the grammar and what it tells of its own
    state; behind "line 1, column 8: " where it names a place. Linear in the text, which holds what clients wrote."""
    text = error.partition("<state>")[0]
    place = _PLACE.match(text)
    text = _COPY.split(text[place.end() if place else 0 :], maxsplit=1)[0]
    if text.startswith("NoExtensionBias"):
        text = "nothing satisfies it"
    _, of_regex, rest = text.partition("regex parse error:\n")
    if of_regex:
        pattern, _, cause = rest.partition("\nerror: ")
        text = f"{cause}, {_marked(pattern)}"
    text = " ".join(text.partition(". Enable '")[0].split())  # an option that no request has
    text = text[:REASON] + "..." if len(text) > REASON else _FOUND.sub(r"\1", text)
    return f"line {place[1]}, column {place[2]}: {text}" if place else text


def _marked(lines: str) -> str:
    """Where in a regular expression the library's marks, in the line below it, point to."""
    pattern, _, marks = lines.partition("\n")
    at = marks.find("^") - 3
    if at < 1 or "\n" in marks:
        return "in a regular expression of several lines"
    return f"at character {at} of {pattern[4:]}"
