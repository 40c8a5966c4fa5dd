"""The KV pool's memory. Owns the arrays; which block belongs to whom is the block index's business, not known here."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

BLOCK = 32
"""Tokens of one block. Fixed: attention walks blocks of absolute positions, so results would change with it."""

KV_DTYPES: dict[str, np.dtype] = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True, slots=True)
class PoolShape:
    """What one pool holds: see `program.KVLayout`."""

    blocks: int
    slots: int
    kv_heads: int
    dim: int
    kv_format: str
    block: int = BLOCK

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all slots."""
        return self.slots * 2 * self.kv_heads * self.block * self.dim * KV_DTYPES[self.kv_format].itemsize


class Pool:
    """`slots` arrays [blocks, 2, kv_heads, block, dim]: keys (after RoPE) at 0, values at 1."""

    def __init__(self, shape: PoolShape) -> None:
        self.shape = shape
        one = (shape.blocks, 2, shape.kv_heads, shape.block, shape.dim)
        self.slots = [np.zeros(one, KV_DTYPES[shape.kv_format]) for _ in range(shape.slots)]

    def clear(self, blocks: list[int]) -> None:
        """Zero these blocks in every slot: a stale NaN times a probability of 0 would be NaN."""
        if blocks:
            for slot in self.slots:
                slot[blocks] = 0

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in self.slots)
