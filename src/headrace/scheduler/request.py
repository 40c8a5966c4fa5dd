"""One choice of a user's request while it lives. Owned and changed by the scheduler alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from headrace.params import SamplingParams
from headrace.scheduler.messages import Timings


class Text(Protocol):
    """Turns tokens into text one by one and looks for stop strings: `tokenize.stream.TextStream`."""

    @property
    def stopped(self) -> str | None:
        """The stop string that matched."""

    def feed(self, token: int) -> tuple[str, str]:
        """(text that the token completed, text that may now be shown), both already cut at a stop string."""

    def finish(self) -> str:
        """The text that was held back, at an end without a stop string."""


class Place(Enum):
    """Where a request is."""

    WAITING = "waiting"
    """In the queue: new or preempted, without blocks."""
    RUNNING = "running"
    """It has a block table; at each step it gets a row where budget and blocks allow."""


@dataclass(slots=True)
class Said:
    """What new tokens meant for one request."""

    tokens: tuple[int, ...] = ()
    pieces: list[str] = field(default_factory=list)
    """For each of `tokens` the text it completed."""
    text: str = ""
    """Text that may now be shown."""
    finish: str | None = None
    """stop or length."""
    reason: int | str | None = None
    """The stop string, or the id from `stop_token_ids`."""


@dataclass(slots=True, eq=False)
class Request:
    """A request of one choice, as rows know it."""

    id: int
    """The row's name for it; never used twice."""
    user: int
    """Id of the user's request."""
    choice: int
    params: SamplingParams
    tokens: list[int]
    """Prompt, then answer."""
    prompt: int
    """How many of `tokens` are prompt."""
    limit: int
    """Most tokens, prompt included: max_tokens, context and pool."""
    eos: frozenset[int]
    """The model's end tokens that end this request."""
    ends: frozenset[int]
    """`eos` and the stop_token_ids."""
    text: Text
    arrived: float
    """time.monotonic() of the arrival."""
    order: int
    """Number of the user's request in order of arrival."""
    rank: tuple[int, ...] = ()
    """Who comes first, by `scheduler.turns`."""
    place: Place = Place.WAITING
    computed: int = 0
    """Tokens whose KV is in the pool."""
    known: bool = False
    """Does the executor know it?"""
    told: int = 0
    """How many blocks of its table the executor has been told."""
    kept: int = 0
    """How many of its first blocks are whole, and kept by the prefix cache or taken from it."""
    keys: list[bytes] = field(default_factory=list)
    """The prefix cache's keys of its whole blocks, as far as they were asked for."""
    root: bytes = b""
    """The key before them."""
    tenant: str = ""
    """Whose it is."""
    pin: bool = False
    """Is what it leaves in the prefix cache never given up?"""
    cached: int = 0
    """Tokens of its prompt that its first row found in the prefix cache."""
    unreported: int = 0
    """How many of the prompt's last tokens still lack their log-probabilities, where they are wanted."""
    preemptions: int = 0
    started: float | None = None
    """When it was first given a row."""
    spoke: float | None = None
    """When its first token came."""

    def hear(self, tokens: tuple[int, ...]) -> Said:
        """Append tokens up to the first that ends the request; those behind it never were.

        An end token is told before a stop string and both before the length, so a stop on the last allowed token is a
        stop.
        """
        said = Said()
        for token in tokens:
            self.tokens.append(token)
            if token in self.ends:  # the sampler does not choose one before min_tokens
                said.pieces.append("")
                said.finish = "stop"
                said.reason = None if token in self.eos else token
                break
            piece, shown = self.text.feed(token)
            said.pieces.append(piece)
            said.text += shown
            if (stop := self.text.stopped) is not None:
                said.finish, said.reason = "stop", stop
                break
            if len(self.tokens) >= self.limit:
                said.finish = "length"
                break
        if not tokens and self.computed >= self.limit:  # only the prompt was asked for
            said.finish = "length"
        if said.finish is not None:
            said.text += self.rest()
        said.tokens = tokens[: len(said.pieces)]
        return said

    def rest(self) -> str:
        """Text that was held back, at the end."""
        return "" if self.text.stopped is not None else self.text.finish()

    def timings(self, now: float) -> Timings:
        """Of a request that ends now."""
        total = now - self.arrived
        return Timings(
            queued_s=total if self.started is None else self.started - self.arrived,
            first_token_s=0.0 if self.spoke is None else self.spoke - self.arrived,
            total_s=total,
            preemptions=self.preemptions,
            cached=self.cached,
        )
