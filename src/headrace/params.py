"""What a request asks of sampling: names and meanings as users know them from vLLM and the OpenAI API.

Everything that can be judged without a model is judged here, on construction. What needs the model (token ids against
the width of the logits, lengths against the context) is judged at admission by the engine.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import RequestError, shown

MAX_STOPS = 16
"""Most stop strings of one request."""
MAX_STOP_CHARS = 4096
"""Longest stop string."""
MAX_LOGPROBS = 100
"""Most alternatives reported per token."""
MAX_CHOICES = 128
"""Largest `n`."""
MAX_SALT_CHARS = 256
"""Longest `cache_salt`."""
LOGPROBS_MODES = ("raw", "processed")
OVERFLOWS = ("error", "truncate-middle", "sliding", "sinks")
GRAMMARS = ("json", "regex", "choice", "lark", "gbnf")
MAX_GRAMMAR_CHARS = 1 << 18
"""Longest `Grammar.source`."""
POOLINGS = ("mean", "last")
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,17}")


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must be, whole."""

    kind: str
    """`json`: a JSON document; `regex`: a match of the whole answer; `choice`: one of several strings; `lark`, `gbnf`:
    a sentence of a context-free grammar."""
    source: str
    """JSON text of a schema, or of a list of strings for `choice`; the regular expression; the grammar. Lark is the
    dialect of llguidance."""

    def __post_init__(self) -> None:
        if self.kind not in GRAMMARS:
            raise RequestError(
                f"a grammar's kind must be one of {', '.join(GRAMMARS)}, not {shown(self.kind)}", "grammar"
            )
        if not isinstance(self.source, str) or not self.source:
            raise RequestError(f"a grammar of kind {self.kind} must be a text that is not empty", "grammar")
        if len(self.source) > MAX_GRAMMAR_CHARS:
            raise RequestError(
                f"a grammar has {len(self.source)} characters, more than the {MAX_GRAMMAR_CHARS} allowed", "grammar"
            )


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The part of an answer that a model thinks in, before what it says."""

    begin: int
    """Token id that begins the thinking."""
    end: int
    """Token id that ends it."""
    budget: int | None = None
    """Most tokens of thinking; then its end is forced."""
    begun: bool = False
    """Does the prompt already stand inside the thinking?"""

    def __post_init__(self) -> None:
        _integer("reasoning.begin", self.begin, 0, 2**31 - 1)
        _integer("reasoning.end", self.end, 0, 2**31 - 1)
        _integer("reasoning.budget", self.budget, 0, 2**31 - 1)


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    Values out of range raise `RequestError` naming the field. `None` for `temperature`, `top_p`, `top_k`, `min_p`,
    `repetition_penalty` means: what the model's generation config says, else 1, 1, off, off, 1.
    """

    n: int = 1
    """Choices per prompt, 1 to 128; each draws its own random numbers."""
    temperature: float | None = None
    """0 is greedy; so is anything below 1e-5."""
    top_p: float | None = None
    """Keep the likeliest tokens that together reach this share, (0, 1]."""
    top_k: int | None = None
    """Keep the k likeliest tokens; 0 and -1 are off."""
    min_p: float | None = None
    """Drop tokens less likely than this share of the likeliest, [0, 1]."""
    repetition_penalty: float | None = None
    """Above 0; divides positive and multiplies negative logits of every token in prompt or answer."""
    presence_penalty: float = 0.0
    """-2 to 2; taken once from the logit of each token already in the answer."""
    frequency_penalty: float = 0.0
    """-2 to 2; taken from the logit of a token for each time it is already in the answer."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id to a number from -100 to 100, added to its logit."""
    seed: int | None = None
    """A signed 64-bit number; without one, one is drawn at admission and reported in the output."""
    max_tokens: int | None = None
    """Most tokens of the answer, at least 1 (0 with prompt_logprobs or pooling alone); None: as many as the context
    holds."""
    min_tokens: int = 0
    """Before this many tokens neither end-of-sequence nor `stop_token_ids` is chosen, and no stop string ends it."""
    stop: Sequence[str] = ()
    """Strings that end the answer and are not part of it; at most 16 of at most 4,096 characters."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the answer."""
    include_stop_str_in_output: bool = False
    """Keep the stop string in the text."""
    ignore_eos: bool = False
    """Go on past the model's own end-of-sequence tokens."""
    logprobs: int | None = None
    """Report the chosen token's log-probability and that many of the likeliest (0: the chosen alone), up to 100."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    logprobs_mode: str = "raw"
    """`raw`: of the model's own logits; `processed`: after penalties, bias and temperature."""
    skip_special_tokens: bool = True
    """Leave control tokens out of the text."""
    overflow: str = "error"
    """What becomes of a text longer than the context. `error`: a prompt is refused, and an answer ends there;
    `truncate-middle`: the prompt's middle is left out; `sliding`: the text goes on in windows of the context's size;
    `sinks`: so that its first 4 tokens stay in all of them."""
    truncate_prompt_tokens: int | None = None
    """Only so many of the prompt's last tokens are read; -1: as many as the context holds beside the answer. Not with
    `overflow`."""
    pooling: str | None = None
    """The answer is no text but the final hidden states of the prompt's tokens as one vector: their `mean`, or that of
    the `last` token. Only with max_tokens 0."""
    cache_salt: str = ""
    """Cached prefixes are shared only among requests of the same salt; at most 256 characters."""
    grammar: Grammar | None = None
    """What the answer must be. Where `max_tokens` cuts it short it is a beginning of that."""
    reasoning: Reasoning | None = None
    """How the model thinks: the grammar holds for what comes after it."""
    priority: int = 0
    """-100 to 100. A request of higher priority goes before others, but overtakes no more than a fixed amount of work
    for each class; what it leaves in the prefix cache is given up later."""

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_CHOICES)
        _number("temperature", self.temperature, 0, math.inf)
        _number("top_p", self.top_p, 0, 1, low_open=True)
        _integer("top_k", self.top_k, -1, 2**63 - 1)
        _number("min_p", self.min_p, 0, 1)
        _number("repetition_penalty", self.repetition_penalty, 0, math.inf, low_open=True)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _integer("seed", self.seed, -(2**63), 2**63 - 1)
        _integer("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _integer("priority", self.priority, -100, 100)
        if not isinstance(self.cache_salt, str) or len(self.cache_salt) > MAX_SALT_CHARS:
            raise RequestError(f"cache_salt must be a string of at most {MAX_SALT_CHARS} characters", "cache_salt")
        for name in ("n", "presence_penalty", "frequency_penalty", "min_tokens", "priority"):
            if getattr(self, name) is None:
                raise RequestError(f"{name} must not be null", name)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, not {getattr(self, name)!r}", name)
        for name, kind in (("grammar", Grammar), ("reasoning", Reasoning)):
            if not isinstance(getattr(self, name), kind | None):
                raise RequestError(f"{name} must be a {kind.__name__}, not {shown(getattr(self, name))}", name)
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise RequestError(f"logprobs_mode must be raw or processed, not {self.logprobs_mode!r}", "logprobs_mode")
        if self.overflow not in OVERFLOWS:
            raise RequestError(
                f"overflow must be one of {', '.join(OVERFLOWS)}, not {shown(self.overflow)}", "overflow"
            )
        self._judge_truncation()
        self._judge_pooling()
        if self.max_tokens == 0 and self.prompt_logprobs is None and self.pooling is None:
            raise RequestError("max_tokens must be at least 1 (0 only with prompt_logprobs or pooling)", "max_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}", "min_tokens"
            )
        object.__setattr__(self, "stop", _stops(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))

    def _judge_truncation(self) -> None:
        _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, 2**31 - 1)
        if self.truncate_prompt_tokens == 0:
            raise RequestError(
                "truncate_prompt_tokens must be at least 1, or -1: what the context holds", "truncate_prompt_tokens"
            )
        if self.truncate_prompt_tokens is not None and self.overflow != "error":
            raise RequestError(
                "truncate_prompt_tokens and overflow both say what becomes of a long prompt: give one of them",
                "truncate_prompt_tokens",
            )

    def _judge_pooling(self) -> None:
        if self.pooling is None:
            return
        if self.pooling not in POOLINGS:
            raise RequestError(f"pooling must be one of {', '.join(POOLINGS)}, not {shown(self.pooling)}", "pooling")
        if self.max_tokens != 0 or self.n != 1 or self.prompt_logprobs is not None or self.windowed:
            raise RequestError(
                "pooling needs max_tokens 0, n 1, and neither prompt_logprobs nor windows (overflow)", "pooling"
            )

    @property
    def bounded(self) -> bool:
        """Must the prompt fit into the context?"""
        return self.overflow == "error" and self.truncate_prompt_tokens is None

    @property
    def sums_states(self) -> bool:
        """Is the answer a sum of all hidden states, so that every token of the prompt must be computed?"""
        return self.pooling == "mean"

    @property
    def windowed(self) -> bool:
        """May the text go on beyond the context?"""
        return self.overflow in ("sliding", "sinks")


def _number(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number, not {shown(value)}", name)
    finite = abs(value) <= sys.float_info.max  # of whole numbers of any size; not of NaN
    if not finite or not low <= value <= high or (low_open and value == low):
        bounds = f"{'above' if low_open else 'at least'} {low:g}" + ("" if high == math.inf else f", at most {high:g}")
        raise RequestError(f"{name} must be {bounds}, not {shown(value)}", name)


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be a whole number, not {shown(value)}", name)
    if not low <= value <= high:
        raise RequestError(f"{name} must be from {low} to {high}, not {shown(value)}", name)


def _stops(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    alone = isinstance(stop, str)
    stops = (stop,) if alone else stop
    if not isinstance(stops, Sequence):
        raise RequestError("stop must be a string or a list of strings", "stop")
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop has {len(stops)} strings, more than the {MAX_STOPS} allowed", "stop")
    for i, s in enumerate(stops):
        at = "stop" if alone else f"stop[{i}]"
        if not isinstance(s, str):
            raise RequestError(f"{at} must be a string", at)
        if not s:
            raise RequestError(f"{at} must not be empty: an empty string would end every answer at once", at)
        if len(s) > MAX_STOP_CHARS:
            raise RequestError(f"{at} has {len(s)} characters, more than the {MAX_STOP_CHARS} allowed", at)
    return tuple(stops)


def _token_ids(ids: Any) -> tuple[int, ...]:
    if ids is None:
        return ()
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        raise RequestError("stop_token_ids must be a list of token ids", "stop_token_ids")
    for at, i in enumerate(ids):
        if isinstance(i, bool) or not isinstance(i, int) or i < 0:
            raise RequestError(f"stop_token_ids[{at}] is {shown(i)}, which is no token id", f"stop_token_ids[{at}]")
    return tuple(ids)


def _bias(bias: Any) -> dict[int, float]:
    if bias is None:
        return {}
    if not isinstance(bias, Mapping):
        raise RequestError("logit_bias must map token ids to numbers from -100 to 100", "logit_bias")
    out: dict[int, float] = {}
    for key, value in bias.items():
        huge = isinstance(key, int) and abs(key) >= 10**18  # str() refuses numbers of thousands of digits
        if isinstance(key, bool) or huge or not _TOKEN_ID.fullmatch(str(key)):
            at = f"logit_bias.{key[:128]}" if isinstance(key, str) else "logit_bias"
            raise RequestError(f"logit_bias has the key {shown(key)}, which is no token id", at)
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise RequestError(
                f"logit_bias.{key} must be a number from -100 to 100, not {shown(value)}", f"logit_bias.{key}"
            )
        if int(key) in out:
            raise RequestError(f"logit_bias has the token id {int(key)} twice", f"logit_bias.{int(key)}")
        out[int(key)] = float(value)
    return out
