"""Judges a request against the model and the engine's limits before anything of it runs. Pure: it keeps nothing.

What can be judged without a model is judged by `SamplingParams` itself.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from headrace.errors import RequestError, shown
from headrace.params import SamplingParams
from headrace.scheduler.windows import LEAST

T = TypeVar("T")

LONGEST = 1 << 20
"""Most tokens of a prompt, characters of a text, and log-probabilities of a prompt (200 bytes each), where a request
says what becomes of those longer than the context."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one engine can hold, in tokens."""

    context: int
    """Longest prompt plus answer."""
    vocab: int
    """Width of the logits, whatever the tokenizer says: every token id is below it."""
    pool_tokens: int
    """Longest sequence that the KV pool holds when it is alone. An answer's last token needs no place in it."""

    @property
    def window(self) -> int:
        """Tokens of the windows of texts that may be longer."""
        return min(self.context, self.pool_tokens)

    @property
    def longest(self) -> int:
        """Longest prompt plus answer that context and pool allow."""
        return min(self.context, self.pool_tokens + 1)


class Defaults(Protocol):
    """What the model's makers suggest; None where they say nothing: `loading.checkpoint.GenerationDefaults`."""

    @property
    def temperature(self) -> float | None: ...
    @property
    def top_p(self) -> float | None: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def min_p(self) -> float | None: ...
    @property
    def repetition_penalty(self) -> float | None: ...


def admit(
    prompt: Sequence[int], params: SamplingParams, *, limits: Limits, defaults: Defaults, param: str = "prompt"
) -> SamplingParams:
    """The parameters with every default filled in and a seed drawn; only max_tokens and the logprobs may stay None.

    RequestError where the request cannot be served: no prompt, a prompt that leaves no room for an answer, token ids
    that the model does not have, an explicit max_tokens that the context does not hold, a min_tokens that cannot be
    reached. `param` is what the client calls the prompt. An answer that only the pool cuts short is not refused: it
    ends with finish_reason "length".
    """
    if len(prompt) == 0:
        raise RequestError(f"{param} is empty: at least one token is needed", param)
    if params.windowed:
        _judge_windows(len(prompt), params, limits, param)
    else:
        left = _left(len(prompt), params, limits)
        _judge_cut(len(prompt), left, params, limits, param)
        _judge_length(left, params, limits, param)
    _judge_ids(prompt, limits.vocab, param)
    _judge_ids(params.stop_token_ids, limits.vocab, "stop_token_ids", "[{at}]")
    _judge_ids(params.logit_bias, limits.vocab, "logit_bias", ".{token}")
    return replace(
        params,
        temperature=_first(params.temperature, defaults.temperature, 1.0),
        top_p=_first(params.top_p, defaults.top_p, 1.0),
        top_k=_first(params.top_k, defaults.top_k, 0),
        min_p=_first(params.min_p, defaults.min_p, 0.0),
        repetition_penalty=_first(params.repetition_penalty, defaults.repetition_penalty, 1.0),
        seed=_first(params.seed, None, secrets.randbits(53)),
    )


def cut(prompt: Sequence[int], params: SamplingParams, limits: Limits) -> Sequence[int]:
    """What is computed of an admitted prompt: all of it, but for `truncate_prompt_tokens`, which keeps its end, and
    `overflow: truncate-middle` where it leaves its answer no room; then as much of its beginning as of its end."""
    left = _left(len(prompt), params, limits)
    if params.truncate_prompt_tokens is not None:
        return prompt[len(prompt) - left :]
    return prompt if left == len(prompt) else [*prompt[: left - left // 2], *prompt[len(prompt) - left // 2 :]]


def reads(prompt: int, params: SamplingParams, limits: Limits) -> int:
    """How many tokens are computed of an admitted prompt of so many: of windows the last alone, unless
    log-probabilities of all are wanted."""
    if params.windowed and params.prompt_logprobs is None:
        return min(prompt, limits.window)
    return _left(prompt, params, limits)


def _left(prompt: int, params: SamplingParams, limits: Limits) -> int:
    """How much of a prompt is computed. Where it is cut there is room for max_tokens (in a pool smaller than the
    context for a quarter at most, since that cuts the answer short), without max_tokens a quarter. Below 1: none is."""
    asked = params.max_tokens
    least = 1 if asked is None else asked
    if (last := params.truncate_prompt_tokens) is not None:
        return min(prompt, last if last > 0 else max(1, min(limits.context - least, limits.pool_tokens)))
    fits = prompt + least <= limits.context and prompt <= limits.pool_tokens
    if params.overflow != "truncate-middle" or fits:
        return prompt
    quarter = limits.longest // 4
    if asked is None:
        return min(prompt, limits.longest - quarter)
    return min(prompt, limits.context - asked, limits.pool_tokens - min(asked, quarter))


def _judge_cut(prompt: int, left: int, params: SamplingParams, limits: Limits, param: str) -> None:
    if (last := params.truncate_prompt_tokens) is not None:
        if last > limits.context:
            raise RequestError(
                f"truncate_prompt_tokens is {last}, but the context has {limits.context} (-1 takes what it holds)",
                "truncate_prompt_tokens",
            )
        return
    if left == prompt:
        return
    if left < limits.longest // 4:
        raise RequestError(
            f"max_tokens is {params.max_tokens}, which leaves {max(0, left)} tokens for {param}, of {prompt}: with "
            f"overflow truncate-middle it can be at most {limits.longest - limits.longest // 4} here",
            "max_tokens",
        )
    if params.prompt_logprobs is not None:
        raise RequestError(
            f"{param} has {prompt} tokens, of which overflow truncate-middle leaves {left}: there are no "
            "log-probabilities of the others, nor of what follows them; overflow sliding gives all",
            "prompt_logprobs",
        )


def _judge_windows(prompt: int, params: SamplingParams, limits: Limits, param: str) -> None:
    if limits.window < LEAST:
        raise RequestError(
            f"overflow {params.overflow} needs windows of at least {LEAST} tokens; the context is {limits.context} "
            f"tokens, and the KV pool holds {limits.pool_tokens}",
            "overflow",
        )
    if prompt * params.n > LONGEST:
        raise RequestError(
            f"{param} has {prompt} tokens, for {params.n} choices; with overflow {params.overflow} they are at most "
            f"{LONGEST} together",
            param,
        )
    each = 0 if params.prompt_logprobs is None else 1 + params.prompt_logprobs
    if prompt > limits.window and prompt * each > LONGEST:
        raise RequestError(
            f"{param} has {prompt} tokens, and each would get {each} log-probabilities; with overflow "
            f"{params.overflow} they are at most {LONGEST} together",
            "prompt_logprobs",
        )
    if params.max_tokens is None and params.min_tokens > limits.longest:
        raise RequestError(
            f"min_tokens is {params.min_tokens}, but without max_tokens an answer ends after {limits.longest} tokens",
            "min_tokens",
        )


def _judge_length(prompt: int, params: SamplingParams, limits: Limits, param: str) -> None:
    asked = params.max_tokens
    least = 1 if asked is None else min(asked, 1)
    hint = "overflow says" if params.pooling is None else "truncate_prompt_tokens says"
    if prompt + least > limits.context:
        raise RequestError(
            f"{param} has {prompt} tokens; the context is {limits.context} tokens, prompt and answer together, which "
            f"leaves at most {limits.context - least} for the prompt ({hint} how to go beyond)",
            param,
        )
    if prompt > limits.pool_tokens:
        raise RequestError(
            f"{param} has {prompt} tokens; the KV pool holds {limits.pool_tokens} (raise pool_bytes to serve more)",
            param,
        )
    if asked is not None and prompt + asked > limits.context:
        raise RequestError(
            f"max_tokens is {asked}, but with a prompt of {prompt} tokens the context of {limits.context} tokens "
            f"leaves at most {limits.context - prompt}",
            "max_tokens",
        )
    if prompt + params.min_tokens > limits.longest:
        raise RequestError(
            f"min_tokens is {params.min_tokens}, but with a prompt of {prompt} tokens only {limits.longest - prompt} "
            f"more fit into the context of {limits.context} and the KV pool of {limits.pool_tokens} tokens",
            "min_tokens",
        )


def _judge_ids(ids: Iterable[int], vocab: int, param: str, inside: str = "") -> None:
    """`inside`: where in `param` one stands, of its place `at` and the `token` itself."""
    for at, i in enumerate(ids):
        if type(i) is not int or not 0 <= i < vocab:
            raise RequestError(
                f"{param} holds {shown(i)}, which is no token id: the model has 0 to {vocab - 1}",
                param + inside.format(at=at, token=i),
            )


def _first(asked: T | None, suggested: T | None, otherwise: T) -> T:
    if asked is not None:
        return asked
    return otherwise if suggested is None else suggested
