"""A program as the native kernels want it: activations converted where a weight's format asks for it, operations
grouped into regions. A rewriting of data: it computes nothing, and no grouping changes a bit of any result.

A region is what is done between two waits of the compute threads. Row by row, a chain of operations that each need
only their own row; or several linear maps of the same rows; or one attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from headrace.native import bf16_row_bytes, int8_row_bytes
from headrace.program.backend import Shaped
from headrace.program.buffers import GIVEN, BufferPlan, plan_buffers
from headrace.program.program import Buffer, Operation, Program

CONVERSIONS = {"BF16": ("to_bf16", bf16_row_bytes), "F16": None, "F32": None}
"""By format of a linear's weight: the operation that its input needs, and the bytes of a converted row; None: float32
as it is. Every format that is not named: int8."""
INT8 = ("to_int8", int8_row_bytes)


@dataclass(frozen=True, slots=True)
class Lowered:
    """Regions and their buffers."""

    body: tuple[tuple[Operation, ...], ...]
    head: tuple[tuple[Operation, ...], ...]
    buffers: Mapping[str, Buffer]
    """The program's, and those of converted activations."""
    body_plan: BufferPlan
    head_plan: BufferPlan


def lower(program: Program, weights: Mapping[str, Shaped], *, fuse: bool = True) -> Lowered:
    """The regions of a program. `fuse=False`: one operation a region."""
    buffers = dict(program.buffers)
    body, head = (
        tuple(_regions(_convert(ops, weights, buffers), buffers, fuse)) for ops in (program.body, program.head)
    )
    outside = (program.hidden, program.logits)  # arrays of the caller's: no slot may be used for anything else
    return Lowered(
        body,
        head,
        buffers,
        plan_buffers(buffers, body, (*GIVEN, program.hidden), (program.hidden,)),
        plan_buffers(buffers, head, outside, outside),
    )


def _convert(ops: Sequence[Operation], weights: Mapping[str, Shaped], buffers: dict[str, Buffer]) -> list[Operation]:
    """The operations with conversions put in, each right after what is converted is written."""
    wanted: dict[str, dict[str, Operation]] = {}
    read: list[Operation] = []
    for op in ops:
        conversion = CONVERSIONS.get(weights[op.weights[0]].name, INT8) if op.kind == "linear" else None
        if conversion is None:
            read.append(op)
            continue
        kind, row_bytes = conversion
        source = buffers[op.inputs[0]]
        name = f"{source.name}.{kind}"
        buffers[name] = Buffer(name, source.extent, row_bytes(source.width) // 4)
        wanted.setdefault(source.name, {})[kind] = Operation(kind, (source.name,), name)
        read.append(Operation(op.kind, (name,), op.output, op.weights, op.attrs, op.layer))
    given = [source for source in wanted if all(op.output != source for op in ops)]
    converted = [conversion for source in given for conversion in wanted[source].values()]
    for op in read:
        converted.append(op)
        converted += wanted.get(op.output or "", {}).values()
    return converted


def _regions(ops: Sequence[Operation], buffers: Mapping[str, Buffer], fuse: bool) -> Iterator[tuple[Operation, ...]]:
    region: list[Operation] = []
    for op in ops:
        if region and not (fuse and _together(region, op, buffers)):
            yield tuple(region)
            region = []
        region.append(op)
    yield tuple(region)


def _together(region: Sequence[Operation], op: Operation, buffers: Mapping[str, Buffer]) -> bool:
    """Whether an operation can join: it counts the same rows, and is row by row like the others, or a linear map that
    reads nothing of what they write. Choosing rows crosses from one count to another, so it begins a region."""
    kinds = {region[0].kind, op.kind}
    if "attend" in kinds or op.kind == "select" or _extent(region[0], buffers) != _extent(op, buffers):
        return False
    if kinds == {"linear"}:
        return not set(op.inputs) & {other.output for other in region}
    return "linear" not in kinds


def _extent(op: Operation, buffers: Mapping[str, Buffer]) -> object:
    return buffers[op.output or op.inputs[0]].extent
