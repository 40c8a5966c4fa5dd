"""The objects of the two endpoints, whole and in chunks, field for field as OpenAI's reference has them.

https://platform.openai.com/docs/api-reference/chat and .../completions. `seed` and `stop_reason` in each choice and
`token_id` in chat logprobs are ours.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.serve.choices import Part, merged
from headrace.serve.tokens import Pieces, chat_logprobs, completion_logprobs
from headrace.tokenize.tools.calls import CallDelta


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one HTTP request; a prompt counts once, whatever n."""

    prompt: int
    completion: int
    cached: int = 0
    """How many of the prompts' tokens came from the prefix cache."""
    thought: int | None = None
    """How many of the completion were thinking; None where the model does not think."""

    def written(self) -> dict[str, Any]:
        out = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        if self.thought is not None:
            out["completion_tokens_details"] = {"reasoning_tokens": self.thought}
        return out


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one answer repeats."""

    model: str
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))
    unique: str = field(default_factory=lambda: uuid.uuid4().hex)

    def written(self, prefix: str, kind: str) -> dict[str, Any]:
        return {
            "id": f"{prefix}-{self.unique}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


class Writer(Protocol):
    """How one endpoint writes parts of choices."""

    def whole(self, choices: Sequence[Part], usage: Usage) -> dict[str, Any]:
        """The body of an answer that is not streamed."""

    def chunks(self, part: Part) -> list[dict[str, Any]]:
        """What a stream sends for one part."""

    def last(self, usage: Usage) -> dict[str, Any]:
        """The chunk without choices that carries the usage."""


def _ending(part: Part) -> dict[str, Any]:
    """The keys that end every choice; the seed comes with the last part."""
    out: dict[str, Any] = {"finish_reason": part.finish_reason, "stop_reason": part.stop_reason}
    return out if part.seed is None else {**out, "seed": part.seed}


def _message(part: Part) -> dict[str, Any]:
    """`content` is null where there is only something else; what there is none of has no key."""
    other = part.reasoning or part.calls
    out: dict[str, Any] = {"role": "assistant", "content": part.text or (None if other else ""), "refusal": None}
    if part.reasoning:
        out["reasoning_content"] = part.reasoning
    if part.calls:
        out["tool_calls"] = [_call(call) for call in part.calls]
    return out


def _deltas(part: Part) -> list[dict[str, Any]]:
    """What a part adds, each kind by itself, as clients expect them; at least one."""
    out: list[dict[str, Any]] = []
    if part.reasoning:
        out.append({"reasoning_content": part.reasoning})
    if part.text:
        out.append({"content": part.text})
    if part.calls:
        out.append({"tool_calls": [{"index": call.index, **_call(call)} for call in merged(part.calls)]})
    return out or [{}]


def _call(call: CallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class ChatWriter:
    """chat.completion and chat.completion.chunk. `logprobs` is the number of alternatives, None for no report."""

    def __init__(self, head: Head, tokenizer: Pieces, *, logprobs: int | None, usage_key: bool) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._usage_key = usage_key
        self._begun: set[int] = set()

    def whole(self, choices: Sequence[Part], usage: Usage) -> dict[str, Any]:
        written = [
            {
                "index": part.index,
                "message": _message(part),
                "logprobs": self._logprobs_of(part),
                **_ending(part),
            }
            for part in choices
        ]
        return {**self._head.written("chatcmpl", "chat.completion"), "choices": written, "usage": usage.written()}

    def chunks(self, part: Part) -> list[dict[str, Any]]:
        out = []
        if part.index not in self._begun:
            self._begun.add(part.index)
            out.append(self._chunk(Part(part.index, ""), {"role": "assistant", "content": "", "refusal": None}))
        *first, last = _deltas(part)
        out += [self._chunk(Part(part.index, ""), delta) for delta in first]
        return [*out, self._chunk(part, last)]

    def last(self, usage: Usage) -> dict[str, Any]:
        return {**self._head.written("chatcmpl", "chat.completion.chunk"), "choices": [], "usage": usage.written()}

    def _chunk(self, part: Part, delta: dict[str, Any]) -> dict[str, Any]:
        logprobs = self._logprobs_of(part) if part.entries else None
        choice = {"index": part.index, "delta": delta, "logprobs": logprobs, **_ending(part)}
        out = {**self._head.written("chatcmpl", "chat.completion.chunk"), "choices": [choice]}
        return {**out, "usage": None} if self._usage_key else out

    def _logprobs_of(self, part: Part) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        return chat_logprobs(part.entries, self._logprobs, self._tokenizer)


class CompletionWriter:
    """text_completion, whole and streamed. `logprobs` is the number of alternatives, None for no report."""

    def __init__(self, head: Head, tokenizer: Pieces, *, logprobs: int | None, usage_key: bool) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._usage_key = usage_key
        self._offsets: dict[int, int] = {}
        """Characters covered by entries so far, which may be fewer than those of the text."""

    def whole(self, choices: Sequence[Part], usage: Usage) -> dict[str, Any]:
        written = [self._choice(part) for part in choices]
        return {**self._head.written("cmpl", "text_completion"), "choices": written, "usage": usage.written()}

    def chunks(self, part: Part) -> list[dict[str, Any]]:
        out = {**self._head.written("cmpl", "text_completion"), "choices": [self._choice(part)]}
        return [{**out, "usage": None} if self._usage_key else out]

    def last(self, usage: Usage) -> dict[str, Any]:
        return {**self._head.written("cmpl", "text_completion"), "choices": [], "usage": usage.written()}

    def _choice(self, part: Part) -> dict[str, Any]:
        offset = self._offsets.get(part.index, 0)
        self._offsets[part.index] = offset + sum(len(entry.text) for entry in part.entries)
        logprobs = None
        if self._logprobs is not None:
            logprobs = completion_logprobs(part.entries, self._logprobs, offset, self._tokenizer)
        return {"index": part.index, "text": part.text, "logprobs": logprobs, **_ending(part)}
