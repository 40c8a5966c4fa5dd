"""What is measured: each line is one kind of work, the same for every engine, and how its figure follows from times.

Engines import this in interpreters of their own: the standard library alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """`streams` requests at once, each of `prompt` tokens and `new` generated ones."""

    name: str
    what: str
    unit: str
    prompt: int
    new: int
    streams: int = 1

    @property
    def most_is_best(self) -> bool:
        return self.unit != "s"


START = Line("start", "start of the process to its first token", "s", prompt=16, new=1)
LINES = {
    line.name: line
    for line in (
        Line("decode", "decode, 1 stream", "tok/s", prompt=8, new=128),
        Line("prefill", "prefill of 512 tokens", "tok/s", prompt=512, new=1),
        Line("streams16", "decode, 16 streams, total", "tok/s", prompt=32, new=64, streams=16),
        START,
    )
}


def prompts(line: Line) -> list[list[int]]:
    """Token ids for each stream, new ones at each call, so that nothing kept from an earlier run can serve.

    All models worth measuring have these ids, and none of them is special there.
    """
    return [[random.randrange(1000, 40000) for _ in range(line.prompt)] for _ in range(line.streams)]


def figure(line: Line, first: Sequence[float], last: Sequence[float]) -> float:
    """Tokens per second. `first` and `last`: seconds from the start of the run to each stream's first and last token.

    Of prompts alone: all their tokens until the last of them has its first new one. Else decoding alone, from the time
    when every stream has its first token; a stream that began a step earlier than the others counts a token too many.
    """
    if line.new == 1:
        return line.streams * line.prompt / max(first)
    return line.streams * (line.new - 1) / (max(last) - max(first))
