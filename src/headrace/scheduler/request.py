"""One choice of a user's request while it lives. Owned and changed by the scheduler alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from headrace.constrain.constraint import Constraint
from headrace.params import SamplingParams
from headrace.scheduler.messages import Timings
from headrace.scheduler.windows import Windows


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
    """What its rows compute, by position: prompt, then answer; of a text longer than the context the window at hand."""
    prompt: int
    """Tokens of the prompt."""
    limit: int
    """Most tokens of the text, prompt included: max_tokens and, without windows, context and pool."""
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
    constraint: Constraint | None = None
    """What its answer must be, as far as it has come."""
    windows: Windows | None = None
    """Where texts longer than the context are asked for."""
    left_out: list[int] = field(default_factory=list)
    """Tokens of the text that the window leaves out, after the sinks."""
    coming: list[int] = field(default_factory=list)
    """Those of the prompt after the window, where their log-probabilities are wanted."""
    reads: int = 0
    """Tokens of the prompt that it computes, or shares with its siblings, unless it goes on to further windows."""
    preemptions: int = 0
    started: float | None = None
    """When it was first given a row."""
    spoke: float | None = None
    """When its first token came."""

    def __post_init__(self) -> None:
        """Choose the window to begin with: the prompt's first where its log-probabilities are wanted, else its last."""
        if self.windows is not None and len(self.tokens) >= self.windows.size:
            if self.unreported:
                self.coming = self.tokens[self.windows.size :]
                del self.tokens[self.windows.size :]
            else:
                self._leave_out(self.windows.left_out(len(self.tokens)))
        self.reads = len(self.tokens) + len(self.coming)

    @property
    def length(self) -> int:
        """Tokens of the text, as far as it is known."""
        return len(self.left_out) + len(self.tokens) + len(self.coming)

    @property
    def answered(self) -> int:
        """Tokens of the answer."""
        return self.length - self.prompt

    @property
    def whole(self) -> tuple[int, ...]:
        """The text."""
        sinks = self.windows.sinks if self.windows else 0
        return (*self.tokens[:sinks], *self.left_out, *self.tokens[sinks:], *self.coming)

    def ends_known(self, end: int) -> bool:
        """Is what comes after position `end` unknown, wanted and to be computed in this window?"""
        most = self.limit if self.windows is None else min(self.limit - len(self.left_out), self.windows.size)
        return end == len(self.tokens) < most

    def scores(self, end: int) -> bool:
        """Do log-probabilities of its prompt that still lack come with a row that ends at position `end`?"""
        return self.unreported > 0 and len(self.left_out) + end > self.prompt - self.unreported

    @property
    def computes_all(self) -> bool:
        """Must it compute what is cached: for log-probabilities, or to sum up hidden states?"""
        return self.unreported > 0 or self.params.sums_states

    def pools(self, end: int) -> bool:
        """Is its vector complete with a row that ends at position `end`?"""
        return self.params.pooling is not None and end == len(self.tokens)

    @property
    def over(self) -> bool:
        """Is its window full, and all told that was to be told of it?"""
        return (
            self.windows is not None and len(self.tokens) >= self.windows.size and self.unreported <= len(self.coming)
        )

    def slide(self) -> None:
        """Go on to the next window."""
        assert self.windows is not None
        step = self.windows.step
        self._leave_out(step)
        self.tokens += self.coming[:step]
        del self.coming[:step]

    def _leave_out(self, count: int) -> None:
        assert self.windows is not None
        sinks = self.windows.sinks
        self.left_out += self.tokens[sinks : sinks + count]
        del self.tokens[sinks : sinks + count]
        self.keys.clear()

    def hear(self, tokens: tuple[int, ...]) -> Said:
        """Append tokens up to the first that ends the request; those behind it never were.

        An end token is told before a stop string, that before the end of what the answer must be, and all before the
        length, so a stop on the last allowed token is a stop.
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
            if self.constraint is not None:
                self.constraint.take(token)
            if (stop := self.text.stopped) is not None:
                said.finish, said.reason = "stop", stop
                break
            if self.constraint is not None and self.constraint.done:
                said.finish = "stop"
                break
            if self.length >= self.limit:
                said.finish = "length"
                break
        if not tokens and len(self.left_out) + self.computed >= self.limit:  # only the prompt was asked for
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
