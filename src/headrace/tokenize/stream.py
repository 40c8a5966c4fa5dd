"""`TextStream`: the text of an answer while its tokens come in, and the stop strings in it. Owns one choice's text that
is not yet out; knows the tokenizer's pieces, no requests."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Sequence

from headrace.tokenize.tokenizer import Tokenizer


class TextStream:
    """Whole characters only, and never a part of a stop string.

    All safe texts and `finish()` joined are `Tokenizer.decode` of all tokens, up to the first stop string: the one that
    is complete first, character by character, and of several complete with the same character the longest. However the
    text is cut into tokens, the result is the same.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """`include_stop`: the stop string stays in the text. `min_tokens`: a stop string counts only where its last
        character is of the token of this number, from 1, or of a later one."""
        self.stopped: str | None = None
        """The stop string that matched."""
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._drops_space = tokenizer.facts.drops_space
        self._watches = [_Watch(string) for string in stop]
        self._firsts = frozenset(string[0] for string in stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._count = 0
        self._held = ""

    def feed(self, token: int) -> tuple[str, str]:
        """(text that the token completed, text that may now be shown), both cut where a stop string was found; nothing
        more comes after one."""
        if self.stopped is not None:
            return "", ""
        self._count += 1
        if token in self._hidden:
            return "", ""
        text = self._decoder.decode(self._tokenizer.piece(token))
        if self._drops_space and text:
            self._drops_space = False
            text = text.removeprefix(" ")
        if not self._held and self._firsts.isdisjoint(text):
            return text, text
        return self._watched(text)

    def finish(self) -> str:
        """The text that was held back, where the answer ends without a stop string. A character that was only begun is
        left out."""
        held, self._held = self._held, ""
        return held

    def _watched(self, text: str) -> tuple[str, str]:
        before = len(self._held)
        whole = self._held + text
        for i, char in enumerate(text, before + 1):
            matched = [watch.string for watch in self._watches if watch.step(char)]
            if matched and self._count >= self._min_tokens:
                self.stopped = max(matched, key=len)
                end = i if self._include_stop else i - len(self.stopped)
                self._held = ""
                return whole[before:end], whole[:end]
        safe = len(whole) - max(watch.matched for watch in self._watches)
        self._held = whole[safe:]
        return text, whole[:safe]


class _Watch:
    """How much of one string the text ends with (Knuth, Morris, Pratt 1977)."""

    __slots__ = ("_back", "matched", "string")

    def __init__(self, string: str) -> None:
        self.string = string
        self.matched = 0
        """Longest proper start of the string that the text ends with."""
        self._back = _borders(string)

    def step(self, char: str) -> bool:
        """Takes the text's next character; is the string complete with it?"""
        string, back, matched = self.string, self._back, self.matched
        while matched and string[matched] != char:
            matched = back[matched]
        if string[matched] == char:
            matched += 1
        complete = matched == len(string)
        self.matched = back[matched] if complete else matched
        return complete


@functools.lru_cache(64)
def _borders(string: str) -> tuple[int, ...]:
    """[i]: length of the longest proper start of string[:i] that is also its end. Found once for all choices of a
    request: for 16 strings of the largest size that takes 20 ms, in which no step runs."""
    back = [0, 0]
    for i in range(1, len(string)):
        matched = back[i]
        while matched and string[matched] != string[i]:
            matched = back[matched]
        back.append(matched + 1 if string[matched] == string[i] else 0)
    return tuple(back)
