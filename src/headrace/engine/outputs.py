"""What the Python API returns: names as users know them from vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.scheduler.messages import Timings


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token at one position."""

    logprob: float
    rank: int | None = None
    """1 is the likeliest."""
    decoded_token: str | None = None


Logprobs = list[dict[int, Logprob]]
"""Per position: token id to its log-probability, the chosen token first, then the likeliest."""


@dataclass(slots=True)
class CompletionOutput:
    """One choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Every generated token, an end token included."""
    pieces: list[str] = field(default_factory=list)
    """For each token the text it completed; joined they are `text` (before a stop string is cut off)."""
    logprobs: Logprobs | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    """stop, length, abort or error."""
    stop_reason: int | str | None = None
    error: str | None = None
    """With `error`: what ended it."""
    timings: Timings | None = None


@dataclass(slots=True)
class RequestOutput:
    """One prompt and its choices."""

    request_id: str
    prompt: str | None
    """As it was given, also where `overflow` left out a part of it."""
    prompt_token_ids: list[int]
    """What was computed of it."""
    outputs: list[CompletionOutput]
    seed: int
    """The seed that was used; asking again with it gives the same choices."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    embedding: tuple[float, ...] = ()
    """With `pooling`: the vector, as it comes from the model."""
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """What `stream` yields: one step's addition to one choice."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    pieces: tuple[str, ...] = ()
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    timings: Timings | None = None
    at: float = 0.0
    """time.monotonic() when the engine had it; 0 where no step brought it."""
