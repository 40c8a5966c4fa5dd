"""Proves that a program is well formed: what every backend may rely on, and what a rewriting must keep."""

from __future__ import annotations

from collections.abc import Collection

from headrace.ops.signatures import SIGNATURES
from headrace.program.program import POSITIONS, TOKENS, WANTED, Operation, Program


def check(program: Program, weights: Collection[str]) -> None:
    """ValueError, naming the operation, where an operation is unknown, does not fit its signature, reads what nobody
    wrote, writes what is written, or names a weight that is not there."""
    written = {TOKENS.name, POSITIONS.name, WANTED.name}
    for op in program.body:
        _check(program, op, weights, written)
    written = {program.hidden}
    for op in program.head:
        _check(program, op, weights, written)


def _check(program: Program, op: Operation, weights: Collection[str], written: set[str]) -> None:
    where = f"operation {op.kind} → {op.output or f'the pool of layer {op.layer}'}"
    if op.kind not in SIGNATURES:
        raise ValueError(f"{where}: no such kind")
    kind = SIGNATURES[op.kind]
    if len(op.inputs) != len(kind.inputs) or (op.output is not None) != kind.output:
        raise ValueError(f"{where}: takes {kind.inputs}, given {op.inputs}")
    if not len(kind.weights) - kind.optional <= len(op.weights) <= len(kind.weights):
        raise ValueError(f"{where}: takes the weights {kind.weights}, given {op.weights}")
    if set(op.attrs) != set(kind.attrs) or not all(isinstance(op.attrs[a], t) for a, t in kind.attrs.items()):
        raise ValueError(f"{where}: takes the attributes {dict(kind.attrs)}, given {dict(op.attrs)}")
    if kind.kv != (op.layer is not None):
        raise ValueError(f"{where}: {'needs' if kind.kv else 'has no use for'} a layer")
    if kind.kv and op.layer is not None:
        program.kv.place(op.layer)
    for name in op.weights:
        if name not in weights and name not in program.constants:
            raise ValueError(f"{where}: there is no weight {name}")
    for name in op.inputs:
        if name not in written:
            raise ValueError(f"{where}: reads {name}, which nobody has written")
    if op.output is not None:
        if op.output in written or op.output not in program.buffers:
            raise ValueError(f"{where}: its output is written twice or is no buffer")
        written.add(op.output)
