"""Which buffers live when, and so how much memory a step's buffers take: known before anything is allocated."""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.program.program import POSITIONS, TOKENS, WANTED, Extent, Operation, Program

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
    """For each operation the buffers that nobody reads after it."""

    def bytes_per(self, extent: Extent) -> int:
        return BYTES * sum(s.width for s in self.slots if s.extent is extent)


def last_uses(ops: Sequence[Operation], keep: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """For each operation the buffers that it reads or writes and nobody uses afterwards, `keep` excepted."""
    seen = set(keep)
    dies: list[tuple[str, ...]] = []
    for op in reversed(ops):
        names = dict.fromkeys((*op.inputs, *(() if op.output is None else (op.output,))))
        dies.append(tuple(name for name in names if name not in seen))
        seen.update(names)
    return tuple(reversed(dies))


def plan_buffers(program: Program, ops: Sequence[Operation], given: Sequence[str], keep: Sequence[str]) -> BufferPlan:
    """Give every buffer of `ops` a slot that no other live buffer has; an output never shares with its inputs.

    `given` are written before the first operation; `keep` outlive the last. The widest buffers choose first (Pisarchyk
    and Lee 2020, greedy by size), so a slot never has to grow.
    """
    dies = last_uses(ops, keep)
    born = dict.fromkeys(given, -1) | {op.output: i for i, op in enumerate(ops) if op.output is not None}
    last = dict.fromkeys(born, len(ops)) | {name: i for i, names in enumerate(dies) for name in names}
    slots: list[Slot] = []
    lives: list[list[tuple[int, int]]] = []
    slot_of: dict[str, int] = {}
    for name in sorted(born, key=lambda n: (-program.buffers[n].width, born[n])):
        buffer, life = program.buffers[name], (born[name], last[name])
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


def body_plan(program: Program) -> BufferPlan:
    given = (TOKENS.name, POSITIONS.name, WANTED.name)
    return plan_buffers(program, program.body, given, (program.hidden,))


def head_plan(program: Program) -> BufferPlan:
    return plan_buffers(program, program.head, (program.hidden,), (program.logits,))


def peak_bytes(program: Program, tokens: int, wanted: int, at_once: int) -> int:
    """Bytes of all buffers of a step of so many tokens, of which so many are wanted, their logits made `at_once` at a
    time; an operation's own workspace (the gathered keys and scores of attention) comes on top."""
    body, head = body_plan(program), head_plan(program)
    return max(
        body.bytes_per(Extent.TOKENS) * tokens + body.bytes_per(Extent.WANTED) * wanted,
        head.bytes_per(Extent.WANTED) * at_once,
    )
