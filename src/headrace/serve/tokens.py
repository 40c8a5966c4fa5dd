"""Names, bytes and log-probabilities of tokens, as the two endpoints write them. Pure functions over a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from headrace.engine.outputs import Logprob
from headrace.serve.choices import Entry
from headrace.serve.written import finite


class Pieces(Protocol):
    """The part of a tokenizer that is needed here."""

    def piece(self, token: int) -> bytes:
        """Raw bytes of one token, a control token's name; none for an id beyond the tokenizer's last."""


def likeliest(position: dict[int, Logprob], count: int) -> list[tuple[int, float]]:
    """The `count` likeliest tokens of a position, best first. The chosen one, which stands first in `position`, is
    among them only where it belongs there."""
    chosen, *others = position.items()
    ranked = [(token, entry.logprob) for token, entry in others]
    ranked.append((chosen[0], chosen[1].logprob))
    ranked.sort(key=lambda pair: -pair[1])
    return ranked[:count]


def chat_logprobs(entries: Sequence[Entry], count: int, tokenizer: Pieces) -> dict[str, Any]:
    """`choices[].logprobs` of a chat: joined `token`s are the text; `bytes` are those of the token where it holds only
    a part of a character. `token_id` is ours."""
    return {"content": [_chat_entry(entry, count, tokenizer) for entry in entries], "refusal": None}


def _chat_entry(entry: Entry, count: int, tokenizer: Pieces) -> dict[str, Any]:
    assert entry.position is not None, "only prompts have a token without log-probabilities, and chats echo none"
    raw = tokenizer.piece(entry.token)
    return {
        "token": entry.text,
        "logprob": finite(next(iter(entry.position.values())).logprob),
        "bytes": list(entry.text.encode() if _is_whole(raw) else raw),
        "top_logprobs": [_chat_top(token, logprob, tokenizer) for token, logprob in likeliest(entry.position, count)],
        "token_id": entry.token,
    }


def _chat_top(token: int, logprob: float, tokenizer: Pieces) -> dict[str, Any]:
    raw = tokenizer.piece(token)
    return {
        "token": raw.decode("utf-8", "replace"),
        "logprob": finite(logprob),
        "bytes": list(raw),
        "token_id": token,
    }


def token_name(tokenizer: Pieces, token: int) -> str:
    """The text of one token, "bytes:\\xf0\\x9f" for a part of a character."""
    return _name(tokenizer.piece(token))


def completion_logprobs(entries: Sequence[Entry], count: int, offset: int, tokenizer: Pieces) -> dict[str, Any]:
    """`choices[].logprobs` of a completion: four lists of equal length. `offset`: characters of text before the first.

    Joined `tokens` are the text. The keys of `top_logprobs` are whole tokens ("bytes:\\xf0\\x9f" for a part of a
    character), the chosen token always among them; where two tokens have one name the likelier is kept.
    """
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.text)
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [
            None if entry.position is None else finite(next(iter(entry.position.values())).logprob) for entry in entries
        ],
        "top_logprobs": [
            None if entry.position is None else _completion_top(entry.position, count, tokenizer) for entry in entries
        ],
        "text_offset": offsets,
    }


def _completion_top(position: dict[int, Logprob], count: int, tokenizer: Pieces) -> dict[str, float]:
    chosen = next(iter(position))
    out: dict[str, float] = {}
    for token, logprob in [*likeliest(position, count), (chosen, position[chosen].logprob)]:
        out.setdefault(_name(tokenizer.piece(token)), finite(logprob))
    return out


def _name(raw: bytes) -> str:
    return raw.decode() if _is_whole(raw) else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _is_whole(raw: bytes) -> bool:
    """Whether these bytes are characters by themselves."""
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True
