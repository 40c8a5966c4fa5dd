"""Which buffers live when, and so how much memory a step's buffers take: known before anything is allocated."""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.program.program import POSITIONS, TOKENS, WANTED, Buffer, Extent, Operation, Program

Region = Sequence[Operation]
"""Operations that may run side by side or row by row: what one of them uses lives as long as the whole region."""

BYTES = 4
"""Of one number in a buffer."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Memory that several buffers use in turn."""

    extent: Extent
    width: int
    """Numbers per token (or wanted token)."""


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """Where the buffers of a list of operations live."""

    slots: tuple[Slot, ...]
    slot_of: dict[str, int]
    """Buffer name to its slot."""
    dies: tuple[tuple[str, ...], ...]
    """For each region the buffers that nobody reads after it."""

    def bytes_per(self, extent: Extent) -> int:
        return BYTES * sum(s.width for s in self.slots if s.extent is extent)


def last_uses(regions: Sequence[Region], keep: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """For each region the buffers that it reads or writes and nobody uses afterwards, `keep` excepted."""
    seen = set(keep)
    dies: list[tuple[str, ...]] = []
    for region in reversed(regions):
        names = dict.fromkeys(n for op in region for n in (*op.inputs, *(() if op.output is None else (op.output,))))
        dies.append(tuple(name for name in names if name not in seen))
        seen.update(names)
    return tuple(reversed(dies))


def plan_buffers(
    buffers: Mapping[str, Buffer], regions: Sequence[Region], given: Sequence[str], keep: Sequence[str]
) -> BufferPlan:
    """Give every buffer of the regions a slot that no other live buffer has; an output never shares with its inputs.

    `given` are there before the first region; `keep` outlive the last; what is both has a slot of its own. The widest
    buffers choose first (Pisarchyk and Lee 2020, greedy by size), so a slot never has to grow.
    """
    dies = last_uses(regions, keep)
    born = {op.output: i for i, region in enumerate(regions) for op in region if op.output is not None}
    born |= dict.fromkeys(given, -1)
    last = dict.fromkeys(born, len(regions)) | {name: i for i, names in enumerate(dies) for name in names}
    slots: list[Slot] = []
    lives: list[list[tuple[int, int]]] = []
    slot_of: dict[str, int] = {}
    for name in sorted(born, key=lambda n: (-buffers[n].width, born[n])):
        buffer, life = buffers[name], (born[name], last[name])
        free = (
            number for number, slot in enumerate(slots) if slot.extent is buffer.extent and _free(lives[number], life)
        )
        number = next(free, len(slots))
        if number == len(slots):
            slots.append(Slot(buffer.extent, buffer.width))
            lives.append([])
        insort(lives[number], life)
        slot_of[name] = number
    return BufferPlan(tuple(slots), slot_of, dies)


def _free(lives: Sequence[tuple[int, int]], life: tuple[int, int]) -> bool:
    """Whether `life`, (first, last) operation, meets none of `lives`, which ascend and do not meet each other."""
    at = bisect(lives, life)
    return (at == 0 or lives[at - 1][1] < life[0]) and (at == len(lives) or lives[at][0] > life[1])


GIVEN = (TOKENS.name, POSITIONS.name, WANTED.name)


def body_plan(program: Program) -> BufferPlan:
    """One operation after the other."""
    return plan_buffers(program.buffers, [(op,) for op in program.body], GIVEN, (program.hidden,))


def head_plan(program: Program) -> BufferPlan:
    return plan_buffers(program.buffers, [(op,) for op in program.head], (program.hidden,), (program.logits,))


def peak_bytes(body: BufferPlan, head: BufferPlan, tokens: int, wanted: int, at_once: int) -> int:
    """Bytes of all buffers of a step of so many tokens, of which so many are wanted, their logits made `at_once` at a
    time; an operation's own workspace (the gathered keys and scores of attention) comes on top."""
    return max(
        body.bytes_per(Extent.TOKENS) * tokens + body.bytes_per(Extent.WANTED) * wanted,
        head.bytes_per(Extent.WANTED) * at_once,
    )
