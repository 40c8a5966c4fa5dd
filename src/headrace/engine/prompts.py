"""Prompts of the Python API: text or token ids, one or several, with the parameters of each. No engine, no threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.engine.admission import LONGEST
from headrace.errors import RequestError
from headrace.params import SamplingParams
from headrace.tokenize.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None

PROBES = (1 << 17, 1 << 20)
"""Characters at the beginning of a text many times as long that are put into tokens first: where they alone are far
more than the context, the text is refused. The whole would take a hundred bytes of memory a character, and a minute."""


def is_prompt(prompts: object) -> bool:
    """One prompt rather than a list of them: a text, or a non-empty list of token ids."""
    return isinstance(prompts, str) or (isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int))


def texts_of(message: object) -> list[str]:
    """Of a message's content; what is no message is judged later."""
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = content if isinstance(content, list | tuple) else [{"text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return [text for text in texts if isinstance(text, str)]


def probe(tokenizer: Tokenizer, text: str, context: int, params: SamplingParams | None, param: str) -> None:
    """RequestError for `param` where the text's beginning alone is more than twice the context: what follows can
    change its last tokens, not their number by half. Where it may be longer, its characters are bounded."""
    if params is not None and not params.bounded:
        if len(text) > LONGEST:
            raise RequestError(
                f"{param} has {len(text)} characters; where it may be cut or windowed they are at most {LONGEST}", param
            )
        return
    for size in PROBES:
        if len(text) <= 4 * size:
            return
        count = len(tokenizer.encode(text[:size], parse_special=False, add_bos=False, param=param))
        if count > 2 * context:
            raise RequestError(
                f"the first {size} of {len(text)} characters alone are {count} tokens, but the context has {context}",
                param,
            )


def typed(prompt: Prompt) -> str | None:
    return prompt if isinstance(prompt, str) else None


def names_of(count: int) -> list[str]:
    """What errors call each of so many prompts."""
    return ["prompt"] if count == 1 else [f"prompts[{i}]" for i in range(count)]


def encode(tokenizer: Tokenizer, prompt: Prompt, parse_special: bool, param: str = "prompt") -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, parse_special=parse_special, param=param)
    if isinstance(prompt, bytes | bytearray | memoryview):
        raise RequestError("a prompt must be text or a list of token ids: decode bytes first", "prompt")
    try:
        return list(prompt)
    except TypeError:
        kind = type(prompt).__name__
        raise RequestError(f"a prompt must be text or a list of token ids, not {kind}", param) from None


def params_of(params: Params, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise RequestError("params must be SamplingParams, one for all prompts or a list of one for each", "params")
    if len(params) != count:
        raise RequestError(f"params has {len(params)} entries for {count} prompts", "params")
    return list(params)
