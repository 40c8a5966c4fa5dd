"""`CallReader`: an answer's text, as it comes in, into content and tool calls. Owns what cannot be told apart yet; what
stands inside the calls is the form's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from headrace.tokenize.tools.calls import CallDelta, Calls, Event
from headrace.tokenize.tools.form import Form
from headrace.tokenize.tools.opening import Opened, openings
from headrace.tokenize.tools.steps import SPACE, Region, Step


class CallReader:
    """Content and calls joined hold every character of the answer, but for the tags of calls and the spaces between and
    around calls. However the text is cut, the joined events are the same. What only begins like a call is content.
    """

    def __init__(
        self, form: Form, calls: Calls, controls: Collection[str] = (), *, held: bool = False, any_text: bool = True
    ) -> None:
        """`controls`: tags that are control tokens. They count where they are marked, and typed out they are text.
        `held`: a grammar of the form holds the answer; calls that lack their tag begin only as it has them. `any_text`:
        an answer of text may begin anyhow; otherwise what begins like a call and is cut short is no content."""
        self.calls = calls
        self._form = form
        self._loose = form.loose if any_text or not held else frozenset[str]()
        """What begins calls that lack their tag."""
        self._firsts = form.firsts | self._loose
        self._is_held = held
        self._symbols = _Symbols(form.tags - set(controls))
        self._region: Region | None = None
        self._spaces = ""
        """At the end of the content so far: a call may follow."""
        self._raw = ""
        """What was read of something that is not yet a call."""
        self._any_text = any_text
        self._has_content = False
        self._is_fresh = True
        """Has nothing but spaces come so far?"""
        self._is_behind_call = False
        """Has nothing but spaces come since the last call?"""

    def feed(self, text: str) -> list[Event]:
        """More of the text."""
        if self._region is None and not self._is_fresh and self._symbols.all_text(text):
            kept = text.rstrip(SPACE)
            if kept:
                self._say(self._spaces + kept)
                self._spaces = ""
                self._is_behind_call = False
            self._spaces += text[len(kept) :]
            return self._taken()
        for symbol in self._symbols.feed(text):
            self._symbol(symbol, symbol)
        return self._taken()

    def mark(self, tag: str, text: str = "") -> list[Event]:
        """A control token that is one of the form's tags; `text` is what shows of it."""
        for symbol in self._symbols.flush():
            self._symbol(symbol, symbol)
        self._symbol(tag, text)
        return self._taken()

    def finish(self) -> list[Event]:
        """At the end of the answer. A call that was cut stays as far as it came."""
        part = self._symbols.flush()
        if self._any_text or self._has_content or self.calls.is_open:
            for symbol in part:
                self._symbol(symbol, symbol)
        is_text = self._raw.strip(SPACE + ",;]") or not self.calls.count
        if not self.calls.is_open and is_text and (self._any_text or self._has_content):
            self._say(self._spaces + self._raw)
        self._spaces = self._raw = ""
        return self._taken()

    def _symbol(self, symbol: str, text: str) -> None:
        """`text`: what of it shows where it is content."""
        if self._region is not None and self._inside(symbol, text):
            return
        if symbol in self._form.begins or (self._is_fresh and symbol in self._firsts):
            self._is_fresh = False
            self._raw = ""
            self._region = self._begun(symbol)
            if symbol in ("{", "["):
                self._inside(symbol, text)
            else:
                self._raw = text
        elif symbol in self._form.ends and self._is_behind_call:
            pass  # of a call that lacked its own last brace
        elif text in SPACE:
            self._spaces += text
        else:
            self._is_fresh = self._is_behind_call = False
            self._say(self._spaces + text)
            self._spaces = ""

    def _begun(self, symbol: str) -> Region:
        region = self._form.region(symbol, self.calls)
        if self._is_held and symbol in self._loose:
            return Opened(region, openings(symbol, self.calls.names))
        return region

    def _inside(self, symbol: str, text: str) -> bool:
        """Offer a symbol to the region. False where it is not the region's."""
        assert self._region is not None
        was_open, count = self.calls.is_open, self.calls.count
        step = self._region.feed(symbol)
        if self.calls.is_open:
            self._spaces = self._raw = ""
        elif step in (Step.MORE, Step.OVER):
            if was_open or self.calls.count > count:
                self._spaces = self._raw = ""
            else:
                self._raw += text
        if step is Step.MORE:
            return True
        self._region = None
        self._is_behind_call = self.calls.count > 0
        if step is Step.OVER:
            self._raw = ""
            return True
        if self._raw.strip(SPACE):
            self._is_behind_call = False
            self._say(self._spaces + self._raw)
            self._spaces = ""
        else:
            self._spaces += self._raw
        self._raw = ""
        return False

    def _say(self, text: str) -> None:
        if text:
            self._has_content = True
            self.calls.events.append(text)

    def _taken(self) -> list[Event]:
        """The events so far, neighbours of one kind joined."""
        out: list[Event] = []
        for event in self.calls.events:
            last = out[-1] if out else None
            if isinstance(event, str) and isinstance(last, str):
                out[-1] = last + event
            elif isinstance(event, CallDelta) and isinstance(last, CallDelta) and event.index == last.index:
                out[-1] = CallDelta(last.index, last.arguments + event.arguments, last.id, last.name)
            else:
                out.append(event)
        self.calls.events.clear()
        return out


class _Symbols:
    """Cuts text into its tags and single characters. None of the tags is the beginning of another."""

    def __init__(self, tags: Collection[str]) -> None:
        self._tags = frozenset(tags)
        self._starts = frozenset(tag[:k] for tag in tags for k in range(1, len(tag)))
        self._firsts = frozenset(tag[0] for tag in tags)
        self._part = ""
        """The beginning of a tag."""

    def all_text(self, text: str) -> bool:
        """Is there no tag in it, not even a part?"""
        return not self._part and self._firsts.isdisjoint(text)

    def feed(self, text: str) -> Iterator[str]:
        waiting = list(reversed(text))
        while waiting:
            part = self._part + waiting.pop()
            if part in self._tags:
                self._part = ""
                yield part
            elif part in self._starts:
                self._part = part
            else:
                self._part = ""
                yield part[0]
                waiting += reversed(part[1:])

    def flush(self) -> Iterator[str]:
        """What was held back, character by character."""
        part, self._part = self._part, ""
        yield from part
