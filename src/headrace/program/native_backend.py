"""The native backend: packs the weights, flattens the program once, and replays it for every batch in one call that
lets go of the interpreter's lock. What it computes is defined bit for bit in docs/exact.md; this file only arranges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from headrace import native
from headrace.cache.pool import Pool
from headrace.errors import OptionError
from headrace.formats.format import Format
from headrace.hardware import thread_nodes
from headrace.program.backend import (
    Batch,
    BytesTaken,
    Largest,
    Member,
    PackedLayout,
    PackedPart,
    PackedStore,
    Shaped,
    count_members,
)
from headrace.program.buffers import BufferPlan, peak_bytes
from headrace.program.check import check
from headrace.program.lowering import CONVERSIONS, INT8, Lowered, lower
from headrace.program.program import Extent, KVLayout, Operation, Program

SEGMENT, TILE, LANES = 512, 16, 16
"""Positions of a segment of attention, most query lines of a tile, numbers beside a line's sums: kSegmentBlocks, kTile
and kLanes in csrc/kernels.h."""
ON_REQUEST = {"amx": "only where --isa asks for it, since it has not run on hardware yet (docs/decisions/0008-amx.md)"}
"""Instruction sets that can be used but are no default, and why."""


class NativeBackend:
    """Runs programs by the kernels of one instruction set."""

    name = "native"
    arithmetic = "native 1"  # counted up with every change of csrc that may change a bit, or where it lies in a block

    def __init__(self, isa: str | None = None, *, fuse: bool = True) -> None:
        """`isa` as in `native.isas()`; default: the first of those. ValueError where this machine has it not."""
        known = native.isas()
        if isa is not None and isa not in known:
            why = dict(native.survey()).get(isa)
            reason = f": {why}" if why else ""
            raise ValueError(f"isa must be one of {', '.join(known)} on this machine, not {isa!r}{reason}")
        self.isa = isa or known[0]
        self.fuse = fuse
        others = [(name, why or ON_REQUEST.get(name)) for name, why in native.survey() if name != self.isa]
        chosen = "was asked for" if isa else f"is the best of {', '.join(n for n in known if n not in ON_REQUEST)}"
        self.because = "; ".join([f"{self.isa} {chosen}", *(f"{name}: {why}" for name, why in others if why)])

    def lacks(self, program: Program) -> str | None:
        dim = program.kv.dim
        if dim % 16 or dim > native.MOST_DIM:
            return f"native kernels take heads of a multiple of 16 channels up to {native.MOST_DIM}, not of {dim}"
        return None

    def members(self, program: Program, weights: Mapping[str, Shaped], kv_format: str) -> list[Member]:
        how = partial(_how, kv_format=kv_format)
        return count_members(program, weights, kv_format, f"native {self.isa}", how)

    def load(
        self,
        program: Program,
        weights: Mapping[str, Format],
        pool: Pool,
        threads: int,
        progress: BytesTaken | None = None,
        store: PackedStore | None = None,
    ) -> NativeRunner:
        """Packed copies of the weights that the program names; the stored ones are not needed afterwards."""
        check(program, weights)
        nodes = thread_nodes(threads)
        try:
            workers = native.Threads(threads, nodes)
        except RuntimeError as error:
            raise OptionError(str(error), "threads") from error
        named = dict.fromkeys(name for op in (*program.body, *program.head) for name in op.weights)
        used = {name: weights[name] for name in named if name in weights}
        vectors = dict(program.constants)
        vectors.update((name, weight.dense()) for name, weight in used.items() if len(weight.shape) != 2)
        matrices = _packed(
            {name: w for name, w in used.items() if len(w.shape) == 2}, workers, progress, store, spread=bool(nodes)
        )
        lowered = lower(program, weights, fuse=self.fuse)
        return NativeRunner(program, lowered, matrices, vectors, pool, workers, self.isa)

    def weight_bytes(self, weights: Mapping[str, Shaped]) -> int:
        """As packed: within a few percent of the file."""
        return sum(
            native.packed_bytes(w.name, *w.shape) if len(w.shape) == 2 else 4 * int(np.prod(w.shape))
            for w in weights.values()
        )

    def buffer_bytes(self, program: Program, weights: Mapping[str, Shaped], most: Largest) -> int:
        """Body and head each keep the largest memory that a step wanted, of one row more. Attention keeps the sums of
        its segments where it computes those apart: of fewer than four tiles for each thread, over all key heads."""
        lowered = lower(program, weights, fuse=self.fuse)
        body = peak_bytes(lowered.body_plan, lowered.head_plan, most.tokens + 1, most.wanted + 1, 0)
        head = peak_bytes(lowered.body_plan, lowered.head_plan, 0, 0, most.at_once + 1)
        segments = -(-most.context // SEGMENT)
        return body + head + 4 * most.threads * TILE * segments * 4 * (program.kv.dim + LANES)


_SPREAD = "spread over the head by a Hadamard matrix"
_CODES = "bfloat16 queries and shares, keys and values as their codes; scales and sums in float32"
_KV_HOW: Mapping[str, Mapping[str, str]] = {
    "f32": {},
    "bf16": {"store": "rounded to bfloat16", "attend": "bfloat16 queries, keys, values and shares; float32 sums"},
    "int8": {"store": f"8 bits and a scale for each 32; {_SPREAD}", "attend": _CODES},
    "int4": {"store": f"keys 8 bits, values 4, and a scale for each 32; {_SPREAD}", "attend": _CODES},
}


def _how(kind: str, matrix: Shaped | None, *, kv_format: str) -> str:
    if matrix is None:
        return _KV_HOW[kv_format].get(kind, "float32")
    bits = 8 * native.packed_bytes(matrix.name, *matrix.shape) / (matrix.shape[0] * matrix.shape[1])
    stored = f"packed to {bits:.2f} bits a weight"
    if kind != "linear":
        return stored
    conversion = CONVERSIONS.get(matrix.name, INT8)
    if conversion is None:
        return f"float32 inputs, {stored}"
    inputs = {"to_int8": "int8 inputs, a scale for each 32", "to_bf16": "bfloat16 inputs"}[conversion[0]]
    return f"{inputs}; {stored}"


def _packed(
    weights: Mapping[str, Format],
    workers: native.Threads,
    progress: BytesTaken | None,
    store: PackedStore | None,
    *,
    spread: bool,
) -> dict[str, native.Packed]:
    """The matrices, packed: those of the store, or made here and given to it. All lie in one piece of memory. `spread`:
    what is kept is copied, so that each part of it comes to lie on the node of the thread that reads it."""
    matrices = {name: native.Packed(weight.name, *weight.shape) for name, weight in weights.items()}
    layout = _layout(weights, matrices)
    kept = store.get(layout) if store is not None else None
    memory = native.reserve(layout.nbytes) if kept is None or spread else kept
    total, done = sum(weight.nbytes for weight in weights.values()), 0
    for part in layout.parts:
        place = memory[part.start : part.start + part.nbytes]
        if kept is None:
            matrices[part.name].fill(weights[part.name].data.reshape(-1), workers, place)
        elif spread:
            matrices[part.name].copy(kept[part.start : part.start + part.nbytes], workers, place)
        else:
            matrices[part.name].view(place)
        done += weights[part.name].nbytes
        if progress is not None:
            progress(done, total)
    if store is not None and kept is None:
        memory.flags.writeable = False
        store.put(layout, memory)
    return matrices


def _layout(weights: Mapping[str, Format], matrices: Mapping[str, native.Packed]) -> PackedLayout:
    """The largest first: the pages of a large one that is read last would come on top of everything packed."""
    parts, start = [], 0
    for name, weight in sorted(weights.items(), key=lambda item: -item[1].nbytes):
        parts.append(PackedPart(name, weight.name, weight.shape, start, matrices[name].nbytes))
        start += matrices[name].nbytes
    return PackedLayout(f"native {native.LAYOUT_VERSION}", tuple(parts), start)


class NativeRunner:
    """A program and its packed weights."""

    def __init__(
        self,
        program: Program,
        lowered: Lowered,
        matrices: Mapping[str, native.Packed],
        vectors: Mapping[str, np.ndarray],
        pool: Pool,
        threads: native.Threads,
        isa: str,
    ) -> None:
        self._kept = (matrices, vectors, pool)  # the flattened program points into them
        shape = pool.shape
        memory = native.Pool(
            [slot.reshape(-1) for slot in pool.slots],
            shape.blocks,
            shape.kv_heads,
            shape.dim,
            shape.kv_format,
        )
        self._width, self._vocab = program.width, program.vocab
        self._body = _flatten(
            program, lowered.body, lowered, lowered.body_plan, matrices, vectors, memory, threads, isa
        )
        self._head = _flatten(program, lowered.head, lowered, lowered.head_plan, matrices, vectors, None, threads, isa)
        self._hidden = lowered.body_plan.slot_of[program.hidden]
        self._taken = lowered.head_plan.slot_of[program.hidden]
        self._logits = lowered.head_plan.slot_of[program.logits]
        self._lines = np.empty((0, program.vocab), np.float32)

    def run(self, batch: Batch) -> np.ndarray:
        hidden = np.empty((len(batch.wanted), self._width), np.float32)
        self._body.run(
            batch.tokens, batch.positions, batch.offsets, batch.tables, batch.wanted, [(self._hidden, hidden)]
        )
        return hidden

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """Good until the next call, which writes to the same memory."""
        if len(hidden) > len(self._lines):
            self._lines = np.empty((len(hidden), self._vocab), np.float32)
        lines = self._lines[: len(hidden)]
        self._head.run_head(len(hidden), [(self._taken, hidden), (self._logits, lines)])
        return lines

    def close(self) -> None:
        """Let go of weights and pool; nothing can be run afterwards."""
        del self._body, self._head, self._kept


def _flatten(
    program: Program,
    regions: Sequence[Sequence[Operation]],
    lowered: Lowered,
    plan: BufferPlan,
    matrices: Mapping[str, native.Packed],
    vectors: Mapping[str, np.ndarray],
    pool: native.Pool | None,
    threads: native.Threads,
    isa: str,
) -> native.Program:
    slots = [(slot.extent is Extent.WANTED, 4 * slot.width) for slot in plan.slots]
    windows = [group.window or 0 for group in program.kv.groups] if pool is not None else []
    flat = native.Program(isa, threads, slots, pool, windows, program.vocab)
    for region in regions:
        first = lowered.buffers[region[0].output or region[0].inputs[0]]
        flat.region(first.extent is Extent.WANTED)
        for op in region:
            _WRITERS[op.kind](_Write(flat, op, program.kv, lowered, plan, matrices, vectors))
    return flat


class _Write:
    """One operation on its way into a flattened program, its names looked up."""

    def __init__(
        self,
        flat: native.Program,
        op: Operation,
        kv: KVLayout,
        lowered: Lowered,
        plan: BufferPlan,
        matrices: Mapping[str, native.Packed],
        vectors: Mapping[str, np.ndarray],
    ) -> None:
        self.flat, self.op, self.attrs = flat, op, op.attrs
        self.ins = [plan.slot_of[name] for name in op.inputs]
        self.out = -1 if op.output is None else plan.slot_of[op.output]
        self.widths = [lowered.buffers[name].width for name in op.inputs]
        self.matrices = [matrices[name] for name in op.weights if name in matrices]
        self.vectors = [vectors[name] for name in op.weights if name in vectors]
        self.dim = kv.dim
        self.group, self.slot = kv.place(op.layer) if op.layer is not None else (0, 0)


def _linear(w: _Write) -> None:
    w.flat.linear(w.ins[0], w.out, w.matrices[0], w.vectors[0] if w.vectors else None)


def _rms_norm(w: _Write) -> None:
    w.flat.rms_norm(w.ins[0], w.out, w.widths[0], w.vectors[0], w.attrs["eps"], w.attrs["offset"])


def _rotate(w: _Write) -> None:
    w.flat.rotate(w.ins[0], w.ins[1], w.out, w.widths[0], w.attrs["dim"], w.widths[1] // 2)


def _attend(w: _Write) -> None:
    scale, softcap, heads = w.attrs["scale"], w.attrs["softcap"] or 0.0, w.widths[0]
    w.flat.attend(w.ins[0], w.out, heads // w.dim, scale, softcap, w.slot, w.group)


_WRITERS: Mapping[str, Callable[[_Write], None]] = {
    "embed": lambda w: w.flat.embed(w.matrices[0], w.out, w.attrs["scale"]),
    "select": lambda w: w.flat.select(w.ins[0], w.out, w.widths[0]),
    "to_int8": lambda w: w.flat.to_int8(w.ins[0], w.out, w.widths[0]),
    "to_bf16": lambda w: w.flat.to_bf16(w.ins[0], w.out, w.widths[0]),
    "rms_norm": _rms_norm,
    "angles": lambda w: w.flat.angles(w.out, w.vectors[0], w.attrs["factor"]),
    "rotate": _rotate,
    "store": lambda w: w.flat.store(w.ins[0], w.ins[1], w.slot, w.group),
    "gated": lambda w: w.flat.gated(w.ins[0], w.ins[1], w.out, w.widths[0], w.attrs["activation"]),
    "add": lambda w: w.flat.add(w.ins[0], w.ins[1], w.out, w.widths[0]),
    "softcap": lambda w: w.flat.softcap(w.ins[0], w.out, w.widths[0], w.attrs["cap"]),
    "linear": _linear,
    "attend": _attend,
}
