"""Puts an engine together: files, program, memory, executor, scheduler. The one place that knows all the parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from headrace.cache.blocks import Blocks
from headrace.hardware import granted_memory

from headrace.cache.pool import BLOCK, PoolShape
from headrace.config import Options
from headrace.errors import OptionError
from headrace.loading.checkpoint import Checkpoint
from headrace.program.backend import Backend
from headrace.program.program import Program

Progress = Callable[[str, int, int], None]
"""(what is being done, bytes done, bytes in all); called often, from the loading thread."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes, known before a weight is read."""

    weights_file: int
    """The tensors as stored."""
    weights: int
    """The tensors as the backend keeps them."""
    pool: PoolShape
    pool_tokens: int
    """Longest sequence that the pool holds when it is alone."""
    token_bytes: int
    """KV of one token over all layers."""


def plan_memory(checkpoint: Checkpoint, program: Program, options: Options, backend: Backend) -> MemoryPlan:
    """Size the KV pool: as asked, else enough for `rows` full contexts within a quarter of the memory granted."""
    layout = program.kv
    one = PoolShape(1, layout.slots, layout.kv_heads, layout.dim, options.cache.kv_format)
    assert options.context is not None, "resolve_options fills it in"
    per_context = len(layout.groups) * -(-options.context // BLOCK)
    weights = backend.weight_bytes(checkpoint.source.tensors)
    if options.cache.pool_bytes is not None:
        blocks = options.cache.pool_bytes // one.block_bytes
    else:
        blocks = min(options.scheduler.rows * per_context, granted_memory() // 4 // one.block_bytes)
    least = len(layout.groups)
    if blocks < least:
        raise OptionError(
            f"pool_bytes must be at least {least * one.block_bytes} for this model: one block of {BLOCK} tokens for "
            f"each of its {least} groups of layers",
            "pool_bytes",
        )
    return MemoryPlan(
        weights_file=sum(t.nbytes for t in checkpoint.source.tensors.values()),
        weights=weights,
        pool=dataclasses.replace(one, blocks=blocks),
        pool_tokens=Blocks(blocks, [g.window for g in layout.groups], BLOCK).most_tokens,
        token_bytes=len(layout.groups) * one.block_bytes // BLOCK,
    )
