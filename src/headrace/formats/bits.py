"""Unpacking that several block formats share: halves as floats, fields of a few bits as bytes. Pure functions on
arrays; knows no format.

Fields of 4, 2 or 1 bits lie in "planes": a group of w bytes holds first the lowest field of every byte, w numbers in
a row, then the next higher field of every byte, and so on. It is how GGML lays out all its block types.
"""

from __future__ import annotations

import numpy as np


def halves(blocks: np.ndarray, at: int) -> np.ndarray:
    """The binary16 at byte `at` of every block: float32 [n, 1] out of uint8 [n, bytes]."""
    return blocks[:, at : at + 2].view("<f2").astype(np.float32)


def planes(packed: np.ndarray, width: int, bits: int) -> np.ndarray:
    """Fields of `bits` bits out of uint8 [n, bytes]: uint8 [n, bytes * 8 / bits], in planes of `width` bytes."""
    n, size = packed.shape
    groups = packed.reshape(n, size // width, width)
    fields = np.empty((n, size // width, 8 // bits, width), np.uint8)
    mask = (1 << bits) - 1
    for plane in range(8 // bits):
        np.right_shift(groups, plane * bits, out=fields[:, :, plane])
    fields &= mask
    return fields.reshape(n, -1)
