"""The KV pool's memory. Owns the arrays; which block belongs to whom is the block index's business, not known here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from headrace import native

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

    def __post_init__(self) -> None:
        for name in ("blocks", "slots", "kv_heads", "dim", "block"):
            if getattr(self, name) < 1:
                raise ValueError(f"a pool's {name} must be at least 1, not {getattr(self, name)}")
        if self.kv_format not in KV_DTYPES:
            raise ValueError(f"kv_format must be one of {', '.join(KV_DTYPES)}, not {self.kv_format!r}")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all slots."""
        return self.slots * 2 * self.kv_heads * self.block * self.dim * KV_DTYPES[self.kv_format].itemsize


class Pool:
    """`slots` arrays [blocks, 2, kv_heads, block, dim]: keys (after RoPE) at 0, values at 1.

    That is how the reference sees a block; the native kernels keep the same bytes of a head of a block in an order of
    their own (csrc/kernels.h). The memory is reserved at once but becomes resident only as blocks are first written,
    by huge pages where the system grants them: an unused pool costs address space only.
    """

    def __init__(self, shape: PoolShape) -> None:
        """MemoryError where the machine cannot reserve `blocks * block_bytes`."""
        self.shape = shape
        dtype = KV_DTYPES[shape.kv_format]
        memory = native.reserve(shape.blocks * shape.block_bytes)
        self._bytes = memory.reshape(shape.slots, shape.blocks, shape.block_bytes // shape.slots)
        whole = self._bytes.view(dtype).reshape(shape.slots, shape.blocks, 2, shape.kv_heads, shape.block, shape.dim)
        self.slots = list(whole)
        self._used = np.zeros(shape.blocks, np.bool_)

    def clear(self, blocks: Sequence[int]) -> None:
        """Makes these blocks zero in every slot before their new owner writes: a stale NaN times a probability of 0
        would be NaN. Blocks handed out for the first time are zero already. IndexError for an id outside the pool.
        """
        if not blocks:
            return
        if min(blocks) < 0 or max(blocks) >= self.shape.blocks:
            raise IndexError(f"block ids run from 0 to {self.shape.blocks - 1}, not {min(blocks)} to {max(blocks)}")
        ids = np.array(blocks)
        for block in ids[self._used[ids]]:
            self._bytes[:, block] = 0
        self._used[ids] = True

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return self._bytes.nbytes
