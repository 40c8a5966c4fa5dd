"""Keys and values of one layer as PyTorch sees them: numbers into the pool's format and back, readably defined."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.formats.kv import GROUP, KV_FORMATS, groups

TINY = 2.0**-100
"""A group of smaller numbers is stored as zeros."""


@dataclass(frozen=True, eq=False)
class Stored:
    """The pool's memory of one layer and what it means."""

    memory: Tensor
    """uint8 [blocks, bytes]: of each block the lines of keys [kv_heads, block, line], then those of values."""
    kv_format: str
    kv_heads: int
    dim: int

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of these blocks, still spread, float32 [n, kv_heads, block, dim] each."""
        form = KV_FORMATS[self.kv_format]
        keys, values = (part.index_select(0, blocks) for part in self._parts())
        return decode(keys, form.key_bits, self.dim), decode(values, form.value_bits, self.dim)

    def write(self, keys: Tensor, values: Tensor, blocks: Tensor, places: Tensor) -> None:
        """float32 [n, kv_heads, dim] each, to a place in a block each."""
        form, (key_lines, value_lines) = KV_FORMATS[self.kv_format], self._parts()
        key_lines[blocks, :, places] = encode(self.spread(keys), form.key_bits)
        value_lines[blocks, :, places] = encode(self.spread(values), form.value_bits)

    def spread(self, x: Tensor) -> Tensor:
        """float32 [..., dim] times the Hadamard matrix, where the format has scales and there is one of that size:
        queries, keys and values alike, and what comes of them. The matrix is its own inverse, so nothing changes, but a
        channel that stands out is spread over all (Ashkboos et al. 2024, QuaRot)."""
        return hadamard(x) if KV_FORMATS[self.kv_format].scaled and not self.dim & (self.dim - 1) else x

    def _parts(self) -> tuple[Tensor, Tensor]:
        form = KV_FORMATS[self.kv_format]
        lines = form.key_line(self.dim), form.value_line(self.dim)
        block = self.memory.shape[1] // (self.kv_heads * sum(lines))
        middle = self.kv_heads * block * lines[0]
        keys, values = self.memory[:, :middle], self.memory[:, middle:]
        return keys.view(-1, self.kv_heads, block, lines[0]), values.view(-1, self.kv_heads, block, lines[1])


def encode(numbers: Tensor, bits: int) -> Tensor:
    """float32 [..., dim] as lines, uint8 [..., line]."""
    if bits > 8:
        return numbers.to(torch.bfloat16 if bits == 16 else torch.float32).contiguous().view(torch.uint8)
    largest, dim = (1 << bits - 1) - 1, numbers.shape[-1]
    filled = torch.nn.functional.pad(numbers, (0, -dim % GROUP)).view(*numbers.shape[:-1], -1, GROUP)
    amax = filled.abs().amax(-1)
    scale = (amax / largest).bfloat16()
    scale = scale.where(amax >= TINY, 0).where(amax.isfinite(), torch.nan)
    coded = (scale > 0)[..., None]
    codes = (filled * (1.0 / scale.float())[..., None]).where(coded, 0).round().to(torch.int8).flatten(-2)
    if bits == 4:
        codes = (codes[..., ::2] & 15) | (codes[..., 1::2] << 4)
    return torch.cat((codes.view(torch.uint8), scale.view(torch.uint8)), -1)


def decode(lines: Tensor, bits: int, dim: int) -> Tensor:
    """Lines [..., line] as float32 [..., dim]."""
    if bits > 8:
        return lines.contiguous().view(torch.bfloat16 if bits == 16 else torch.float32).float()
    count = groups(dim)
    codes = lines[..., : -2 * count].view(torch.int8)
    if bits == 4:
        codes = torch.stack((codes << 4 >> 4, codes >> 4), -1).flatten(-2)
    scale = lines[..., -2 * count :].contiguous().view(torch.bfloat16).float()
    return (codes.reshape(*lines.shape[:-1], count, GROUP) * scale[..., None]).flatten(-2)[..., :dim]


def hadamard(x: Tensor) -> Tensor:
    """[..., dim], a power of two from 16 on, times Sylvester's matrix over its root. Sums are formed in the order of
    the native kernels, so that codes are the same."""
    dim = x.shape[-1]
    parts = x.reshape(*x.shape[:-1], -1, 16)
    out = torch.zeros_like(parts)
    for i in range(16):
        signs = torch.tensor([-1.0 if (i & j).bit_count() % 2 else 1.0 for j in range(16)])
        out = out + parts[..., i, None] * signs
    step = 16
    while step < dim:
        pairs = out.reshape(*x.shape[:-1], -1, 2, step)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        out = torch.stack((first + second, first - second), -2)
        step *= 2
    return out.reshape(x.shape) * float(np.float32(1) / np.sqrt(np.float32(dim)))
