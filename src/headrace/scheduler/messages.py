"""What goes into the engine and what comes out of it: plain data that could go over a wire."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.execute.plan import TokenLogprob
from headrace.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Submit:
    """A user's request, already judged: n choices over one prompt."""

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    """Resolved: no None but in `max_tokens`, `logprobs` and `prompt_logprobs`."""
    arrived: float
    """time.monotonic() when the request came in."""
    tenant: str = ""
    """Whose it is: tenants get equal shares of the engine."""
    pin: bool = False
    """What it leaves in the prefix cache is never given up."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Nobody waits for this request any more. Unknown or finished ids are ignored."""

    id: int


Message = Submit | Abort


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds, by the monotonic clock, of one choice."""

    queued_s: float
    """From arrival to the first step that computed some of it."""
    first_token_s: float
    """From arrival to the first token; 0 where there was none."""
    total_s: float
    """From arrival to the end."""
    preemptions: int = 0
    cached: int = 0
    """Prompt tokens that were not computed, because the prefix cache had them."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one choice."""

    request: int
    choice: int
    tokens: tuple[int, ...] = ()
    """New tokens, an ending one included."""
    pieces: tuple[str, ...] = ()
    """For each of `tokens` the text it completed: empty inside a character, for an end token, for hidden specials."""
    text: str = ""
    """Text that may now be shown: never part of a stop string, never part of a character."""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    """The next part of the prompt's, in order."""
    embedding: tuple[float, ...] = ()
    """With `finish` of a request with `pooling`: its vector."""
    finish: str | None = None
    """stop, length, abort or error; set once, on the last delta of a choice."""
    stop_reason: int | str | None = None
    """The stop string or the id from `stop_token_ids` that ended it; None for the model's own end token."""
    error: str | None = None
    timings: Timings | None = None
    """With `finish`; None where the request never came to its turn or the engine stopped."""
    at: float = 0.0
    """time.monotonic() of the step's end; 0 where no step brought it."""
