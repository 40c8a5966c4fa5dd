"""The `prompt` of a completion: its four forms, and its text again for echo. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace.errors import RequestError
from headrace.tokenize.stream import TextStream

if TYPE_CHECKING:
    from headrace.tokenize.tokenizer import Tokenizer

FORMS = "must be a string, a list of token ids, a list of strings, or a list of lists of token ids"


def prompts_of(prompt: Any, param: str = "prompt") -> list[str | list[int]]:
    """One prompt or several, as texts or token ids. RequestError names the one at fault, in the field `param`."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise RequestError(f"{param} {FORMS}", param)
    if not prompt:
        raise RequestError(f"{param} must not be an empty list", param)
    kind = type(prompt[0])
    if kind not in (str, int, list):
        raise RequestError(f"{param} {FORMS}", param)
    if (other := _first_other(prompt, kind)) is not None:
        raise RequestError(f"{param} {FORMS}; {param}[{other}] is of another kind than the first", f"{param}[{other}]")
    if kind is int:
        return [prompt]
    if kind is list:
        for i, ids in enumerate(prompt):
            _check_ids(ids, f"{param}[{i}]")
    return list(prompt)


def _check_ids(ids: list[Any], at: str) -> None:
    if not ids:
        raise RequestError(f"{at} must not be empty", at)
    if (other := _first_other(ids, int)) is not None:
        raise RequestError(f"{at}[{other}] must be a token id, a whole number", f"{at}[{other}]")


def _first_other(items: list[Any], kind: type) -> int | None:
    """The first that is not exactly of this kind; quick where all are, for lists may hold a million."""
    if set(map(type, items)) == {kind}:
        return None
    return next(i for i, item in enumerate(items) if type(item) is not kind)


def prompt_pieces(tokenizer: Tokenizer, ids: Sequence[int], typed: str | None) -> tuple[str, ...]:
    """For each token of a prompt the text it adds; joined they are what echo shows. Control tokens show their names,
    but for a beginning-of-sequence token that the tokenizer put before a text (`typed`).
    """
    stream = TextStream(tokenizer, skip_special=False)
    pieces = [stream.feed(token)[0] for token in ids]
    if typed is not None and pieces and ids[0] == tokenizer.bos and not typed.startswith(pieces[0]):
        pieces[0] = ""
    return tuple(pieces)
