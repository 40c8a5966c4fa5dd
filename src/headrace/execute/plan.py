"""What can be asked of an executor in one step, and what comes back: frozen plain data that could go over a wire.

Rows are increments: an executor keeps each request's block tables and sampling state between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from headrace.params import SamplingParams


class Want(IntEnum):
    """What a row is to give back."""

    NOTHING = 0
    """Only the KV it computes: a chunk that does not reach the end of the known tokens."""
    TOKEN = 1
    """The next token after the last known one (and after each draft)."""
    PROMPT = 2
    """Log-probabilities of the row's own tokens, given what stands before them; no token."""
    BOTH = 3
    """PROMPT and TOKEN."""
    HIDDEN = 4
    """The final hidden states of all the request's tokens up to the end of this row, pooled as its parameters say; no
    token."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A request new to the executor, or back after a preemption: what its sampling state is built from."""

    request: int
    """Unique among live requests; one per choice."""
    choice: int
    """Index among the n choices of the user's request: a part of the random numbers' key."""
    params: SamplingParams
    """With every None replaced by the model's default, and a seed."""
    tokens: tuple[int, ...]
    """Prompt, then what was generated before a preemption, or in earlier windows."""
    prompt: int
    """How many of `tokens` are prompt."""
    eos: frozenset[int]
    """Token ids that may not be chosen before `min_tokens`: end-of-sequence (unless ignored) and `stop_token_ids`."""
    left_out: int = 0
    """How many of `tokens` its rows leave out: what stands at position p of a row is token p + left_out (but for first
    ones that were kept)."""


@dataclass(frozen=True, slots=True)
class Row:
    """These tokens, starting here. Prefill, chunk, decode step and the checking of a draft differ only in length."""

    request: int
    start: int
    """Position of tokens[0] = number of tokens whose KV is already in the pool."""
    tokens: tuple[int, ...]
    """Known tokens, then drafts."""
    blocks: tuple[tuple[int, ...], ...]
    """Per KV group: the block ids to append to the request's table. They are zeroed before use unless `shared`."""
    want: Want
    drafts: int = 0
    """How many of the last tokens are drafts."""
    shared: int = 0
    """How many of the first of `blocks` (in every group) already hold the KV of the same tokens.
    -1 stands in `blocks` for a block outside the group's window, which will never be read."""
    copied: tuple[int, ...] = ()
    """Per KV group: a block whose contents go into the first block after the `shared` ones, because its first tokens
    are the same; none where it is empty. Copies are made before the step, in the order of rows, and before blocks are
    zeroed."""


@dataclass(frozen=True, slots=True)
class Move:
    """Blocks that go to a tier, or come from one, beside the steps. Until it is over nobody writes to them."""

    key: bytes
    blocks: tuple[int, ...]
    """Per KV group; -1: none."""
    load: bool


@dataclass(frozen=True, slots=True)
class Moved:
    """A move that is over."""

    key: bytes
    load: bool
    done: bool
    """Were the bytes kept, or found?"""
    seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """One step."""

    rows: tuple[Row, ...]
    admitted: tuple[Admission, ...] = ()
    released: tuple[int, ...] = ()
    """Requests whose state is dropped before this step: finished, aborted or preempted."""
    moves: tuple[Move, ...] = ()
    """To begin with this step."""
    waits: bool = False
    """Is there nothing to do before a move is over?"""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities at one position."""

    token: int
    logprob: float
    rank: int
    """1 is the likeliest; ties go to the lower id."""
    top: tuple[tuple[int, float], ...] = ()
    """(token, logprob) of the likeliest, best first."""


@dataclass(frozen=True, slots=True)
class RowResult:
    """What one row gave."""

    tokens: tuple[int, ...] = ()
    """The target's own next token after the last known token, then after each draft: 1 + drafts of them, or none."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `tokens`, where the request asked."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    """One for each token of the row, where wanted; None for the first token of the prompt."""
    embedding: tuple[float, ...] = ()
    """float32 numbers, where HIDDEN was wanted: as many as the model is wide."""
    error: str | None = None
    """The request cannot go on (its logits are not finite): the reason. Nobody else is touched."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one step gave, row for row."""

    rows: tuple[RowResult, ...] = field(default_factory=tuple)
    moved: tuple[Moved, ...] = ()
    """Moves of this and earlier steps that are over."""


class Mask(NamedTuple):
    """Which tokens one row may be given."""

    lines: npt.NDArray[np.uint32]
    """[1 + drafts, width of the logits / 32]: bit t % 32 of word t / 32 allows token t, after the last known token and
    then after each draft."""
    error: str | None = None
    """The request cannot go on: the reason."""


Masks = Callable[[], Mapping[int, Mask]]
"""Waits for a step's masks, by request; they may be made while its program runs. Who has none may be given any token.
The one thing in a step that is more than ints: masks are made above the executor and used below."""


class Executor(Protocol):
    """Runs plans. Arrays, but for masks, exist only behind this line."""

    def run(self, plan: Plan, masks: Masks | None = None) -> Result: ...

    def close(self) -> None:
        """Give memory and threads back; no run afterwards."""
