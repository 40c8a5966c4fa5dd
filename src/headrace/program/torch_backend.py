"""The reference backend: PyTorch interprets the program, one operation after the other, in float32.

It turns every weight into dense float32 when it takes it over, so it needs four bytes per parameter. Importing this
imports PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.cache.pool import Pool
from headrace.formats.format import Format
from headrace.ops.attention import WORKSPACE, KVIndex
from headrace.ops.kv import Stored
from headrace.ops.registry import OPS
from headrace.program.backend import Batch, BytesTaken, Largest, Member, PackedStore, Shaped, count_members
from headrace.program.buffers import body_plan, head_plan, last_uses, peak_bytes
from headrace.program.check import check
from headrace.program.program import POSITIONS, TOKENS, WANTED, Operation, Program


class TorchBackend:
    """Runs programs by the operations' PyTorch references."""

    name = "torch"
    arithmetic = f"torch {torch.__version__}"
    because = "asked for"

    def lacks(self, program: Program) -> str | None:
        return None

    def members(self, program: Program, weights: Mapping[str, Shaped], kv_format: str) -> list[Member]:
        return count_members(program, weights, kv_format, "torch", lambda kind, weight: "float32")

    def load(
        self,
        program: Program,
        weights: Mapping[str, Format],
        pool: Pool,
        threads: int,
        progress: BytesTaken | None = None,
        store: PackedStore | None = None,
    ) -> TorchRunner:
        """Dense float32 copies of the weights that the program names. Sets PyTorch's threads for the whole process."""
        check(program, weights)
        torch.set_num_threads(threads)
        used = list(dict.fromkeys(name for op in (*program.body, *program.head) for name in op.weights))
        total = sum(weights[name].nbytes for name in used if name in weights)
        dense: dict[str, Tensor] = {}
        done = 0
        for name in used:
            if name in weights:
                dense[name] = torch.from_numpy(weights[name].dense())
                done += weights[name].nbytes
                if progress is not None:
                    progress(done, total)
            else:
                dense[name] = torch.from_numpy(program.constants[name])
        return TorchRunner(program, dense, pool)

    def weight_bytes(self, weights: Mapping[str, Shaped]) -> int:
        """Four bytes per number."""
        return 4 * sum(math.prod(weight.shape) for weight in weights.values())

    def buffer_bytes(self, program: Program, weights: Mapping[str, Shaped], most: Largest) -> int:
        """Attention gathers keys and values, and has scores and their shares side by side."""
        return (
            peak_bytes(body_plan(program), head_plan(program), most.tokens, most.wanted, most.at_once)
            + 3 * 4 * WORKSPACE
        )


@dataclass(frozen=True, slots=True)
class _Step:
    """An operation with everything that does not change from batch to batch looked up."""

    call: Callable[..., Tensor]
    inputs: tuple[str, ...]
    output: str | None
    weights: tuple[Tensor, ...]
    attrs: dict[str, Any]
    dies: tuple[str, ...]
    group: int | None
    """Of operations on the pool: whose `KVIndex` they take."""


class TorchRunner:
    """A program and its dense weights."""

    def __init__(self, program: Program, weights: Mapping[str, Tensor], pool: Pool) -> None:
        self._program = program
        self._block = pool.shape.block
        shape = pool.shape
        self._pool = [Stored(torch.from_numpy(s), shape.kv_format, shape.kv_heads, shape.dim) for s in pool.slots]
        self._body = self._bind(program.body, weights, program.hidden)
        self._head = self._bind(program.head, weights, program.logits)

    def _bind(self, ops: Sequence[Operation], weights: Mapping[str, Tensor], keep: str) -> list[_Step]:
        steps = []
        for op, dies in zip(ops, last_uses([(op,) for op in ops], (keep,)), strict=True):
            attrs, group = dict(op.attrs), None
            if op.layer is not None:
                group, slot = self._program.kv.place(op.layer)
                attrs["pool"] = self._pool[slot]
            named = tuple(weights[name] for name in op.weights)
            steps.append(_Step(OPS[op.kind].reference, op.inputs, op.output, named, attrs, dies, group))
        return steps

    def _index(self, batch: Batch) -> list[KVIndex]:
        kv = self._program.kv
        return [
            KVIndex.of(
                batch.positions,
                batch.offsets,
                batch.lengths,
                table,
                window=group.window,
                heads=self._program.heads,
                kv_heads=kv.kv_heads,
                block=self._block,
                dim=kv.dim,
            )
            for group, table in zip(kv.groups, batch.tables, strict=True)
        ]

    def run(self, batch: Batch) -> np.ndarray:
        index = self._index(batch)
        buffers = {
            TOKENS.name: torch.from_numpy(batch.tokens),
            POSITIONS.name: torch.from_numpy(batch.positions),
            WANTED.name: torch.from_numpy(batch.wanted),
        }
        return _interpret(self._body, buffers, index, self._program.hidden)

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        return _interpret(self._head, {self._program.hidden: torch.from_numpy(hidden)}, (), self._program.logits)

    def close(self) -> None:
        """Let go of weights and pool; nothing can be run afterwards."""
        self._body.clear()
        self._head.clear()
        self._pool.clear()


@torch.inference_mode()
def _interpret(steps: list[_Step], buffers: dict[str, Tensor], index: Sequence[KVIndex], result: str) -> np.ndarray:
    for step in steps:
        inputs = [buffers[name] for name in step.inputs]
        if step.group is None:
            output = step.call(*inputs, *step.weights, **step.attrs)
        else:
            output = step.call(*inputs, *step.weights, index=index[step.group], **step.attrs)
        if step.output is not None:
            buffers[step.output] = output
        for name in step.dies:
            del buffers[name]
    array: np.ndarray = buffers[result].numpy()
    return array
