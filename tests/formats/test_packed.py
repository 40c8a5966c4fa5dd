"""Packed weights against their two definitions: the numbers are those of the format, bit for bit, and the bytes those
that csrc/layout.h describes, written here once more and slowly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace import native
from headrace.formats import FORMATS
from headrace.formats.bits import planes
from headrace.loading.gguf import GGUF

BITS = {
    **dict.fromkeys(("Q4_0", "Q4_1", "IQ4_NL", "Q4_K", "IQ4_XS"), 4),
    "Q5_0": 5,
    "Q5_1": 5,
    "Q5_K": 5,
    "Q8_0": 8,
    "Q2_K": 2,
    "Q3_K": 3,
    "Q6_K": 6,
}
PLAIN = {"BF16": 32, "F16": 16, "F32": 16}
"""By name: inputs are filled up to a multiple of so many."""
SHAPES = [(1, 256), (16, 512), (37, 768), (64, 256)]
ODD = [(5, 32), (17, 96), (33, 160)]
"""For formats of blocks of 32: the last chunk is half empty."""


def random_lines(name: str, shape: tuple[int, int]) -> np.ndarray:
    form = FORMATS[name]
    return np.random.default_rng(shape[0]).integers(0, 256, (shape[0], form.line_bytes(shape[1])), np.uint8)


def packed(name: str, shape: tuple[int, int], lines: np.ndarray, threads: int = 2) -> native.Packed:
    weight = native.Packed(name, *shape)
    weight.fill(lines.reshape(-1), native.Threads(threads))
    return weight


CASES = [(n, s) for n in BITS for s in SHAPES + (ODD if FORMATS[n].block == 32 else [])]
CASES += [(n, s) for n in PLAIN for s in [*SHAPES, (3, 1), (17, 33), (16, 31), (40, 70)]]


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_the_numbers_are_the_formats(name: str, shape: tuple[int, int]) -> None:
    lines = random_lines(name, shape)
    weight, dense = packed(name, shape, lines), FORMATS[name](shape, lines).dense()
    for output in range(shape[0]):
        ours, theirs = weight.line(output), dense[output]
        same = (ours.view(np.uint32) == theirs.view(np.uint32)) | (np.isnan(ours) & np.isnan(theirs))
        assert same.all(), output


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_the_bytes_are_those_of_the_layout(name: str, shape: tuple[int, int]) -> None:
    lines = random_lines(name, shape)
    expected = (plain_panels if name in PLAIN else quantized_panels)(name, shape, lines)
    assert np.array_equal(packed(name, shape, lines).data(), expected)


def test_into_memory_of_the_callers() -> None:
    lines = random_lines("Q4_K", (37, 512))
    own = packed("Q4_K", (37, 512), lines)
    weight = native.Packed("Q4_K", 37, 512)
    raw = np.full(weight.nbytes + 256, 77, np.uint8)
    start = 64 + -raw.ctypes.data % 64
    weight.fill(lines.reshape(-1), native.Threads(1), raw[start : start + weight.nbytes])
    assert np.array_equal(raw[start : start + weight.nbytes], own.data())
    assert (raw[:start] == 77).all() and (raw[start + weight.nbytes :] == 77).all()
    assert weight.data().ctypes.data == raw.ctypes.data + start
    for bad in (raw[start + 1 : start + 1 + weight.nbytes], raw[start : start + weight.nbytes - 64]):
        with pytest.raises(ValueError):
            native.Packed("Q4_K", 37, 512).fill(lines.reshape(-1), native.Threads(1), bad)
        with pytest.raises(ValueError):
            native.Packed("Q4_K", 37, 512).view(bad)


@pytest.mark.parametrize("model", ["smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
def test_w2_each_tensor_of_a_real_file_by_its_own_type(test_model: Callable[[str], Path], model: str) -> None:
    source, pick = GGUF(test_model(model)), np.random.default_rng(0)
    kinds: dict[str, int] = {}
    for name, info in source.tensors.items():
        kinds[info.format] = kinds.get(info.format, 0) + 1
        if len(info.shape) != 2 or kinds[info.format] > 4:
            continue
        stored = source.read(name)
        weight = packed(info.format, info.shape, stored.data)  # type: ignore[arg-type]
        for output in pick.integers(0, info.shape[0], 8).tolist():
            dense = stored.shard(slice(output, output + 1)).dense()[0]
            assert np.array_equal(weight.line(output).view(np.uint32), dense.view(np.uint32)), (name, output)
    assert len(kinds) > 2
    source.close()


# layout.h in NumPy


def plain_panels(name: str, shape: tuple[int, int], lines: np.ndarray) -> np.ndarray:
    size = FORMATS[name].block_bytes
    wide = -(-shape[1] // PLAIN[name]) * PLAIN[name]
    out = np.zeros((-(-shape[0] // 16), 16, wide, size), np.uint8)
    out.reshape(-1, wide, size)[: shape[0], : shape[1]] = lines.reshape(*shape, size)
    if name == "BF16":
        out = out.reshape(-1, 16, wide // 2, 4).swapaxes(1, 2)
    return out.reshape(-1)


def quantized_panels(name: str, shape: tuple[int, int], lines: np.ndarray) -> np.ndarray:
    form, bits = FORMATS[name], BITS[name]
    groups = form.block // 32 if form.block == 256 else 2
    panels, chunks = -(-shape[0] // 16), -(-shape[1] // (32 * groups))
    per_chunk = 1 if form.block == 256 else 2
    blocks = np.zeros((panels * 16, chunks * per_chunk, form.block_bytes), np.uint8)
    there = lines.reshape(shape[0], -1, form.block_bytes)
    present = np.zeros(blocks.shape[:2], bool)
    present[: shape[0], : there.shape[1]] = True
    blocks[: shape[0], : there.shape[1]] = there
    code, scales, subs = fields(name, blocks.reshape(-1, form.block_bytes))
    for field in (code, *subs):
        field[~present.reshape(-1)] = 0
    code = code.reshape(panels, 16, chunks, groups, 8, 4).transpose(0, 2, 3, 4, 1, 5)  # panel chunk group quad lane 4
    parts = []
    for scale in scales:  # [panel][chunk][group or 1][lane] binary16
        part = scale.reshape(panels, 16, chunks, -1, 2).transpose(0, 2, 3, 1, 4)
        parts.append(part.reshape(panels, chunks, -1))
    if per_chunk == 1 and len(scales) == 1:
        parts.append(np.zeros((panels, chunks, 32), np.uint8))
    for sub in subs:  # pairs
        part = sub.reshape(panels, 16, chunks, -1, 2).transpose(0, 2, 3, 1, 4)
        parts.append(part.reshape(panels, chunks, -1))
    parts.append(codes_of(bits, code).reshape(panels, chunks, -1))
    out = np.concatenate(parts, axis=2)
    assert out.shape[2] % 64 == 0 and panels * chunks * out.shape[2] == native.packed_bytes(name, *shape)
    return out.reshape(-1)


def codes_of(bits: int, code: np.ndarray) -> np.ndarray:
    """[..., quad, lane, 4] of codes to [..., 64 * bits]."""
    if bits == 8:
        return code
    out = []
    if bits >= 4:
        out += [code[..., 2 * j, :, :] & 15 | (code[..., 2 * j + 1, :, :] & 15) << 4 for j in range(4)]
    if bits in (2, 3, 6):
        two = code >> 4 if bits == 6 else code & 3
        out += [sum(two[..., 4 * j + f, :, :] << 2 * f for f in range(4)) for j in range(2)]
    if bits in (3, 5):
        out.append(sum((code[..., j, :, :] >> (bits - 1) & 1) << j for j in range(8)))
    return np.stack(out, axis=-3).astype(np.uint8)


def fields(name: str, b: np.ndarray) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """Codes [n, block], scales (and minima) [n, 2] each, sub-scales (and minima) [n, 8 or 16] each."""
    match name:
        case "Q4_0" | "IQ4_NL":
            return planes(b[:, 2:], 16, 4), [b[:, :2]], []
        case "Q4_1":
            return planes(b[:, 4:], 16, 4), [b[:, :2], b[:, 2:4]], []
        case "Q5_0":
            return planes(b[:, 6:], 16, 4) | fifth(b[:, 2:6]) << 4, [b[:, :2]], []
        case "Q5_1":
            return planes(b[:, 8:], 16, 4) | fifth(b[:, 4:8]) << 4, [b[:, :2], b[:, 2:4]], []
        case "Q8_0":
            return b[:, 2:] ^ 128, [b[:, :2]], []
        case "Q2_K":
            return planes(b[:, 16:80], 32, 2), [b[:, 80:82], b[:, 82:84]], [b[:, :16]]
        case "Q3_K":
            low, high = b[:, 96:104], b[:, 104:108]
            scale = np.concatenate([low & 15, low >> 4], 1) | planes(high, 4, 2) << 4
            return planes(b[:, 32:96], 32, 2) | planes(b[:, :32], 32, 1) << 2, [b[:, 108:]], [scale - 32]
        case "Q4_K":
            return planes(b[:, 16:], 32, 4), [b[:, :2], b[:, 2:4]], six_bits(b[:, 4:16])
        case "Q5_K":
            code = planes(b[:, 48:], 32, 4) | planes(b[:, 16:48], 32, 1) << 4
            return code, [b[:, :2], b[:, 2:4]], six_bits(b[:, 4:16])
        case "Q6_K":
            return planes(b[:, :128], 64, 4) | planes(b[:, 128:192], 32, 2) << 4, [b[:, 208:]], [b[:, 192:208]]
        case _:  # IQ4_XS
            low = np.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], 2).reshape(-1, 8)
            high = b[:, 2:4].copy().view("<u2") >> 2 * np.arange(8, dtype=np.uint16) & 3
            return planes(b[:, 8:], 16, 4), [b[:, :2]], [(low | high.astype(np.uint8) << 4) - 32]


def fifth(four: np.ndarray) -> np.ndarray:
    return np.unpackbits(four, axis=1, bitorder="little")


def six_bits(p: np.ndarray) -> list[np.ndarray]:
    s, m, rest = p[:, :4], p[:, 4:8], p[:, 8:]
    return [
        np.concatenate([s & 63, rest & 15 | s >> 6 << 4], 1),
        np.concatenate([m & 63, rest >> 4 | m >> 6 << 4], 1),
    ]
