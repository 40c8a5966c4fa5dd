"""One choice of a chat, token by token, into thinking, content and tool calls. Owns what of it is not yet told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from headrace.serve.choices import Entry, Part
from headrace.tokenize.thinking import Thinking
from headrace.tokenize.tools.calls import CallDelta
from headrace.tokenize.tools.reader import CallReader


class Split:
    """Thinking and content together are the text of the answer, less the two tags around the thinking and, where tools
    are offered, the calls; however the tokens are cut into parts. The tags of the thinking are found by their ids.
    """

    def __init__(
        self,
        thinking: Thinking | None,
        reader: CallReader | None,
        marks: Mapping[int, str],
        *,
        begun: bool = False,
        shows_thinking: bool = True,
        logprobs: bool = False,
    ) -> None:
        """`marks`: control tokens that the reader knows, by id. `begun`: the prompt ends inside the thinking."""
        self._thinking = thinking
        self._reader = reader
        self._marks = marks
        self._is_thinking = begun
        self._may_begin = thinking is not None and not begun
        self._shows = shows_thinking
        self._logprobs = logprobs
        self._entries: list[Entry] = []
        """Told with the next addition."""

    def add(self, part: Part) -> Part:
        """What a part holds, maybe nothing that can be told yet. Every token must come with its entry."""
        reasoning, events, thought = "", [], 0
        for entry in part.entries:
            is_begin = self._may_begin
            said = self._thought(entry)
            if said is None:
                events += self._answer(entry)
            else:
                reasoning += said
                thought += self._is_thinking and not is_begin
            if self._logprobs and (said is None or self._shows):
                self._entries.append(entry)
        finish = part.finish_reason
        if finish is not None and self._reader is not None:
            events += self._reader.finish()
            calls = self._reader.calls
            if finish == "stop" and calls.count and not calls.is_open:
                finish = "tool_calls"
        content = "".join(event for event in events if isinstance(event, str))
        calls_added = tuple(event for event in events if isinstance(event, CallDelta))
        if not self._shows:
            reasoning = ""
        entries: tuple[Entry, ...] = ()
        if content or reasoning or calls_added or finish:
            entries, self._entries = tuple(self._entries), []
        return replace(
            part,
            text=content,
            reasoning=reasoning,
            calls=calls_added,
            thought=thought,
            entries=entries,
            finish_reason=finish,
        )

    def _thought(self, entry: Entry) -> str | None:
        """What an entry adds to the thinking; None where it belongs to the answer."""
        if self._thinking is None:
            return None
        if self._may_begin:
            self._may_begin = False
            if entry.token == self._thinking.begin:
                self._is_thinking = True
                return ""
        if not self._is_thinking:
            return None
        if entry.token != self._thinking.end:
            return entry.text
        self._is_thinking = False
        # where the bytes before the tag were no characters, what stands for them comes with the tag
        return entry.text[: max(0, len(entry.text) - len(self._thinking.end_tag))]

    def _answer(self, entry: Entry) -> list[str | CallDelta]:
        if self._reader is None:
            return [entry.text] if entry.text else []
        if entry.token in self._marks:
            return self._reader.mark(self._marks[entry.token], entry.text)
        return self._reader.feed(entry.text)
