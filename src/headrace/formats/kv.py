"""Number formats of cached keys and values: how many bytes a token takes. Who reads and writes them is not known here.

A head's numbers of one token are a line. Codes are whole numbers of 8 or 4 bits, with a bfloat16 scale for each group
of 32 channels, the last group filled up with zeros. As the reference lays a line out, codes come first (of 4 bits:
channels 2i and 2i + 1 in one byte, the lower half first), then the scales; the native kernels keep a head of a block in
an order of their own (csrc/kernels.h). How numbers become codes is told in docs/exact.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GROUP = 32
"""Channels that share a scale."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """One of them."""

    name: str
    key_bits: int
    value_bits: int

    @property
    def scaled(self) -> bool:
        """Numbers are codes with scales; else they are floats."""
        return self.key_bits <= 8

    def key_line(self, dim: int) -> int:
        """Bytes of a line of keys."""
        return self._line(dim, self.key_bits)

    def value_line(self, dim: int) -> int:
        """Bytes of a line of values."""
        return self._line(dim, self.value_bits)

    def _line(self, dim: int, bits: int) -> int:
        return groups(dim) * (GROUP * bits // 8 + 2) if self.scaled else dim * bits // 8


def groups(dim: int) -> int:
    """Scales of a line."""
    return -(-dim // GROUP)


KV_FORMATS: Mapping[str, KVFormat] = {
    f.name: f
    for f in (KVFormat("f32", 32, 32), KVFormat("bf16", 16, 16), KVFormat("int8", 8, 8), KVFormat("int4", 8, 4))
}
"""`int4` keeps keys in 8 bits: what 4 do to them, docs/decisions/0010-kv-formats.md has measured."""
