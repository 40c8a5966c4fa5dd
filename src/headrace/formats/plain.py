"""F32, F16 and BF16: one number after the other, little endian.

Sources: IEEE 754 binary32 and binary16; bfloat16 is the upper half of a binary32.
"""

from __future__ import annotations

import numpy as np

from headrace.formats.format import Format


class F32(Format):
    """binary32, 4 bytes a number."""

    name = "F32"
    block = 1
    block_bytes = 4

    @classmethod
    def decode_into(cls, blocks: np.ndarray, out: np.ndarray) -> None:
        out.view(np.uint8)[...] = blocks


class F16(Format):
    """binary16, 2 bytes a number."""

    name = "F16"
    block = 1
    block_bytes = 2

    @classmethod
    def decode_into(cls, blocks: np.ndarray, out: np.ndarray) -> None:
        out[...] = blocks.view("<f2")


class BF16(Format):
    """bfloat16, 2 bytes a number: sign, 8 bits of exponent and the first 7 of a binary32's fraction."""

    name = "BF16"
    block = 1
    block_bytes = 2

    @classmethod
    def decode_into(cls, blocks: np.ndarray, out: np.ndarray) -> None:
        bits = out.view(np.uint32)
        bits[...] = blocks.view("<u2")
        bits <<= 16
