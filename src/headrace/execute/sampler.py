"""From logits to tokens: the order of the steps, and what each request's sampling remembers.

Owns `SamplingState` (built from an `Admission` alone, so that a preempted request goes on as if nothing had happened)
and `reduce`, which turns lines of logits into answers. Each line is answered from itself and its own state: who else is
in the call cannot matter. Knows no rows, tables or programs; the arithmetic is `headrace.ops.sampling`'s, or that of
another implementation of its `Sampling`, which gives the same bits.

The steps, for one line of logits (all float32; each is one IEEE operation per token, rounded to nearest even):

1. The model's own logits must hold a finite largest value: NaN, +inf or nothing but -inf is this line's error.
   With `logprobs` and `logprobs_mode="raw"`: log-probabilities are taken here.
2. `logit_bias`: x + bias.
3. Tokens that the line's mask does not allow become -inf, and before `min_tokens` tokens of the answer the ids of
   `Admission.eos`. If nothing is left, that is this line's error.
4. Penalties. `repetition_penalty` on every id of prompt or answer: x / p if x > 0, else x * p. Then for ids of the
   answer alone: x - frequency_penalty * count, then - presence_penalty. p and the result are held within the normal,
   finite float32 numbers; a token that was -inf stays so.
5. `temperature`. Below 1e-5 it is greedy: the likeliest token (the lower id among equals) is the answer, and nothing
   below applies. With `logprobs_mode="processed"`: log-probabilities are taken here (greedy: at temperature 1).
6. `top_k`, `top_p`, `min_p`, then the draw: `ops.sampling.choose`, with the random number of
   (seed, choice, index of the token in the answer).

A draft counts as a token of the answer for the positions after it, and is forgotten if it is not accepted. The
log-probabilities of a prompt are always those of the model's own logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.execute.plan import Admission, TokenLogprob
from headrace.ops import sampling
from headrace.ops.sampling import Floats, Knobs, Sampling

GREEDY_BELOW = 1e-5
"""Temperatures below this one are greedy."""
_NUMBERS_AHEAD = 64
_Number = TypeVar("_Number", int, float)
MaskLine = npt.NDArray[np.uint32]
"""A line of an `execute.plan.Mask`: bit t % 32 of word t / 32 allows token t."""

NOT_FINITE = "the model's logits are not finite (NaN or infinity)"
NOTHING_LEFT = "no token may be chosen: min_tokens or the grammar excludes every token that the model allows"


class Penalties:
    """How often each token occurs in prompt and answer, and the penalties on that.

    `push` and `pop` undo each other exactly, last in first out: that is how drafts are tried.
    """

    __slots__ = ("_counts", "_frequency", "_ids", "_places", "_presence", "_prompt", "_repetition")

    def __init__(self, repetition: float, presence: float, frequency: float, prompt: Sequence[int]) -> None:
        self._repetition = np.float32(min(max(repetition, sampling.FLOAT32_MIN), sampling.FLOAT32_MAX))
        self._presence = np.float32(presence)
        self._frequency = np.float32(frequency)
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self._prompt = len(self._places)
        self._ids = np.fromiter(self._places, np.int64, self._prompt)
        self._counts = np.zeros(self._prompt, np.float32)

    def push(self, token: int) -> None:
        """One more token of the answer."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            room = np.zeros(place + 64, np.int64)
            self._ids = np.concatenate((self._ids, room))
            self._counts = np.concatenate((self._counts, room.astype(np.float32)))
        self._ids[place] = token
        self._counts[place] += 1

    def pop(self, token: int) -> None:
        """Takes the last `push`, which was of `token`, back."""
        place = self._places[token]
        self._counts[place] -= 1
        if place >= self._prompt and self._counts[place] == 0:
            del self._places[token]

    def counts(self) -> dict[int, int]:
        """Token to how often the answer has it; 0 for tokens of the prompt alone."""
        return {token: int(self._counts[place]) for token, place in self._places.items()}

    def apply(self, line: Floats) -> None:
        """Step 4, in place, on float32 [vocab]."""
        ids, counts = self._ids[: len(self._places)], self._counts[: len(self._places)]
        before = line[ids]
        with np.errstate(over="ignore", under="ignore"):
            x = np.where(before > 0, before / self._repetition, before * self._repetition)
            x -= self._frequency * counts
            x -= self._presence * (counts > 0)
        np.clip(x, -sampling.FLOAT32_MAX, sampling.FLOAT32_MAX, out=x)
        line[ids] = np.where(np.isneginf(before), before, x)


class SamplingState:
    """What one request's sampling knows. `advance` tells it of every row before the row's lines are reduced."""

    __slots__ = (
        "_bias_ids", "_bias_values", "_drafts", "_eos", "_first_number", "_numbers", "choice", "greedy", "length",
        "logprobs", "min_p", "min_tokens", "penalties", "plain", "prompt", "prompt_logprobs", "raw", "seed",
        "temperature", "top_k", "top_p",
    )  # fmt: skip

    def __init__(self, admission: Admission, vocab: int) -> None:
        """`vocab` is the width of the logits: ids of `Admission.eos` beyond it cannot be chosen anyway."""
        params = admission.params
        self.seed, self.choice = _given("seed", params.seed), admission.choice
        self.temperature = _given("temperature", params.temperature)
        self.greedy = self.temperature < GREEDY_BELOW
        self.top_k = _given("top_k", params.top_k)
        self.top_p, self.min_p = _given("top_p", params.top_p), _given("min_p", params.min_p)
        self.min_tokens = params.min_tokens
        self.logprobs, self.prompt_logprobs = params.logprobs, params.prompt_logprobs
        self.raw = params.logprobs_mode == "raw"
        self._eos = np.array(sorted(token for token in admission.eos if token < vocab), np.int64)
        self._bias_ids = np.array(list(params.logit_bias), np.int64)
        self._bias_values = np.array(list(params.logit_bias.values()), np.float32)
        self._numbers: list[int] = []
        self._first_number = -1

        self.prompt = admission.prompt
        self.length = len(admission.tokens)
        self._drafts: tuple[int, ...] = ()
        self.penalties: Penalties | None = None
        repetition = _given("repetition_penalty", params.repetition_penalty)
        if repetition != 1 or params.presence_penalty or params.frequency_penalty:
            self.penalties = Penalties(
                repetition, params.presence_penalty, params.frequency_penalty, admission.tokens[: self.prompt]
            )
            self._take(admission.tokens[self.prompt :])
        self.plain = (
            self.greedy and self.logprobs is None and not (params.logit_bias or self.min_tokens or self.penalties)
        )
        """Is the likeliest token the whole answer, always?"""

    def advance(self, start: int, known: tuple[int, ...], drafts: tuple[int, ...]) -> None:
        """A row of known tokens at `start`, then drafts. Drafts of the row before stand where this one starts after
        the tokens known so far: those were accepted, the others are forgotten. ValueError where tokens are missing.
        """
        accepted = max(0, start - self.length)
        if accepted > len(self._drafts):
            raise ValueError(f"a row starts at {start}, but only {self.length + len(self._drafts)} tokens are known")
        new = self._drafts[:accepted] + known[max(0, self.length - start) :]
        self._drafts = drafts
        if new:
            self._take(new)
            self.length += len(new)

    def _take(self, answer: Sequence[int]) -> None:
        if self.penalties:
            for token in answer:
                self.penalties.push(token)

    def index(self, ahead: int) -> int:
        """Index in the answer of the token after the last known one and `ahead` drafts."""
        return self.length - self.prompt + ahead

    def number(self, index: int) -> int:
        """The 64-bit random number of that token of the answer. Made in batches, a function of `index` all the same."""
        first = index - index % _NUMBERS_AHEAD
        if first != self._first_number:
            self._numbers = sampling.numbers(self.seed, self.choice, sampling.DRAW, first, _NUMBERS_AHEAD)
            self._first_number = first
        return self._numbers[index - first]

    def knobs(self, index: int) -> Knobs:
        """How that token of the answer is drawn."""
        return Knobs(self.temperature, self.top_k, self.top_p, self.min_p, self.number(index))

    def touches(self, index: int) -> bool:
        """Do steps 2 to 4 change anything at this token of the answer, without a mask?"""
        return bool(index < self.min_tokens or self.penalties or self._bias_ids.size)

    def touch(self, line: Floats, ahead: int, allowed: MaskLine | None = None) -> None:
        """Steps 2 to 4, in place, on float32 [vocab], for the position after `ahead` drafts."""
        line[self._bias_ids] += self._bias_values
        if allowed is not None:
            bits = np.unpackbits(allowed.astype("<u4", copy=False).view(np.uint8), count=line.size, bitorder="little")
            np.copyto(line, -np.inf, where=bits == 0)
        if self.index(ahead) < self.min_tokens:
            line[self._eos] = -np.inf
        if self.penalties:
            drafts = self._drafts[:ahead]
            for token in drafts:
                self.penalties.push(token)
            self.penalties.apply(line)
            for token in reversed(drafts):
                self.penalties.pop(token)


def _given(name: str, value: _Number | None) -> _Number:
    if value is None:
        raise ValueError(f"an admission's sampling parameters must be resolved: {name} is None")
    return value


# -- lines of logits to answers ----------------------------------------------------------------------------------------


class Draw(NamedTuple):
    """Asks a line for the request's next token after `ahead` drafts."""

    state: SamplingState
    ahead: int = 0
    allowed: MaskLine | None = None
    """The line's mask; None: any token."""

    @property
    def plain(self) -> bool:
        """Is the likeliest token the whole answer?"""
        return self.state.plain and self.allowed is None


class Score(NamedTuple):
    """Asks a line for the log-probability of a token that is known to follow, and of the `top` likeliest."""

    token: int
    top: int


Ask = Draw | Score


class Answer(NamedTuple):
    """What one line gave."""

    token: int | None = None
    """To a `Draw`, unless there is an error."""
    logprob: TokenLogprob | None = None
    """To a `Score`, and to a `Draw` whose request asked for it."""
    error: str | None = None


def reduce(logits: Floats, asks: Sequence[Ask], arithmetic: Sampling = sampling) -> list[Answer]:
    """One answer for each line of float32 [n, vocab], which is overwritten."""
    if all(isinstance(ask, Draw) and ask.plain for ask in asks):
        tokens, peaks = arithmetic.peaks(logits)
    else:
        tokens, peaks = arithmetic.pick(logits, [_knobs(ask) for ask in asks])
    answers = []
    for line, ask, token, peak in zip(logits, asks, tokens.tolist(), peaks.tolist(), strict=True):
        if not math.isfinite(peak):
            answers.append(Answer(error=NOT_FINITE))
        elif isinstance(ask, Score):
            answers.append(Answer(logprob=_score(arithmetic, line, peak, 1.0, ask.token, ask.top)))
        elif ask.plain:
            answers.append(Answer(token))
        else:
            answers.append(_draw(arithmetic, line, ask, token, peak))
    return answers


def _knobs(ask: Ask) -> Knobs | None:
    """What the model's own logits are drawn with; None where they are not drawn from."""
    if isinstance(ask, Score) or ask.state.greedy:
        return None
    index = ask.state.index(ask.ahead)
    touched = ask.allowed is not None or ask.state.touches(index)
    return None if touched else ask.state.knobs(index)


def _draw(arithmetic: Sampling, line: Floats, ask: Draw, token: int, peak: float) -> Answer:
    """The whole order of steps for one line whose raw logits are good; `token` is theirs, if nothing touches them."""
    state = ask.state
    index = state.index(ask.ahead)
    raw, raw_peak = line, peak
    if ask.allowed is not None or state.touches(index):
        if state.raw and state.logprobs is not None:
            raw = line.copy()
        state.touch(line, ask.ahead, ask.allowed)
        tokens, peaks = arithmetic.pick(line[None], [None if state.greedy else state.knobs(index)])
        token, peak = int(tokens[0]), float(peaks[0])
        if peak == -np.inf:
            return Answer(error=NOTHING_LEFT)
    if state.logprobs is None:
        return Answer(token)
    if state.raw:
        return Answer(token, _score(arithmetic, raw, raw_peak, 1.0, token, state.logprobs))
    temperature = 1.0 if state.greedy else state.temperature
    return Answer(token, _score(arithmetic, line, peak, temperature, token, state.logprobs))


def _score(arithmetic: Sampling, line: Floats, peak: float, temperature: float, token: int, top: int) -> TokenLogprob:
    return TokenLogprob(token, *arithmetic.score(line, peak, temperature, token, top))
