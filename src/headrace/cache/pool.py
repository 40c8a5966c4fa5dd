"""The KV pool's memory. Owns the arrays; which block belongs to whom is the block index's business, not known here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.lib.stride_tricks import as_strided

from headrace import native
from headrace.formats.kv import KV_FORMATS

BLOCK = 32
"""Tokens of one block. Fixed: attention walks blocks of absolute positions, so results would change with it."""

RESIDENT = 2 << 20
"""Bytes that become resident at a time where the system grants huge pages; on a virtual machine that can take
milliseconds."""

Bytes = bytes | bytearray | memoryview


def slot_stride(nbytes: int, slots: int) -> int:
    """Bytes from one slot's array to the next, of `nbytes` each: a little more (a huge page over all slots at most)
    where otherwise many slots would enter a new huge page with the same block, and a step would wait for all of them.
    """
    if nbytes < RESIDENT:
        return nbytes

    def least_gap(stride: int) -> int:
        places = sorted(slot * stride % RESIDENT for slot in range(slots))
        return min(b - a for a, b in pairwise([*places, places[0] + RESIDENT]))

    return max(range(nbytes, nbytes + RESIDENT // slots + 1, 4096), key=least_gap)


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
        if self.kv_format not in KV_FORMATS:
            raise ValueError(f"kv_format must be one of {', '.join(KV_FORMATS)}, not {self.kv_format!r}")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all slots."""
        form = KV_FORMATS[self.kv_format]
        lines = form.key_line(self.dim) + form.value_line(self.dim)
        return self.slots * self.kv_heads * self.block * lines


class Pool:
    """`slots` arrays uint8 [blocks, bytes of a block in one slot].

    The reference sees in a block [kv_heads, block] lines of keys (after RoPE), then as many of values, a line being a
    head's numbers of one token in the pool's format (`formats.kv`); the native kernels keep the bytes of a head in an
    order of their own (csrc/kernels.h). The memory is reserved at once but becomes resident only as blocks are first
    written, by huge pages where the system grants them: an unused pool costs address space only.
    """

    def __init__(self, shape: PoolShape) -> None:
        """MemoryError where the machine cannot reserve `blocks * block_bytes`."""
        self.shape = shape
        each = shape.block_bytes // shape.slots
        stride = slot_stride(shape.blocks * each, shape.slots)
        memory = native.reserve(shape.slots * stride)
        self._bytes = as_strided(memory, (shape.slots, shape.blocks, each), (stride, each, 1))
        self.slots = list(self._bytes)
        self._used = np.zeros(shape.blocks, np.bool_)

    def clear(self, blocks: Sequence[int]) -> None:
        """Makes these blocks zero in every slot before their new owner writes: a stale NaN times a probability of 0
        would be NaN. Blocks handed out for the first time are zero already. IndexError for an id outside the pool.
        """
        if not blocks:
            return
        self._judge(blocks)
        ids = np.array(blocks)
        for block in ids[self._used[ids]]:
            self._bytes[:, block] = 0
        self._used[ids] = True

    def copy(self, source: int, target: int) -> None:
        """One block's contents to another, in every slot. IndexError for an id outside the pool."""
        self._judge((source, target))
        self._bytes[:, target] = self._bytes[:, source]
        self._used[target] = True

    def read(self, block: int) -> bytes:
        """A block's bytes, slot after slot."""
        return self._bytes[:, block].tobytes()

    def write(self, block: int, content: Bytes) -> None:
        """A block's bytes, as `read` gave them. ValueError for another number of bytes."""
        self._bytes[:, block] = np.frombuffer(content, np.uint8).reshape(self.shape.slots, -1)
        self._used[block] = True

    def _judge(self, blocks: Sequence[int]) -> None:
        if min(blocks) < 0 or max(blocks) >= self.shape.blocks:
            raise IndexError(f"block ids run from 0 to {self.shape.blocks - 1}, not {min(blocks)} to {max(blocks)}")

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return self._bytes.nbytes
