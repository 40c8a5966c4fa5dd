"""The compiled kernels, as Python sees them: a typed front of the extension module `_core`, built from csrc.

What the kernels compute, bit for bit, is in docs/exact.md. Knows no program and no model.
"""

from headrace.native._core import (
    LAYOUT_VERSION,
    MOST_DIM,
    Packed,
    Pool,
    Program,
    Threads,
    bf16_row_bytes,
    int8_row_bytes,
    isas,
    packed_bytes,
    reserve,
    survey,
)

__all__ = [
    "LAYOUT_VERSION",
    "MOST_DIM",
    "Packed",
    "Pool",
    "Program",
    "Threads",
    "bf16_row_bytes",
    "int8_row_bytes",
    "isas",
    "packed_bytes",
    "reserve",
    "survey",
]
