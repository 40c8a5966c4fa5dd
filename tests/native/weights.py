"""Random weights as files hold them: every bit of a block is random but the scales, which are what a model may have."""

from __future__ import annotations

import numpy as np

from headrace.formats import FORMATS
from headrace.formats.format import Format

SCALES: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "IQ4_NL": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_XS": (0,),
}
"""Where the binary16 numbers of a block are, by quantized format."""


def random_weight(name: str, outputs: int, inputs: int, rng: np.random.Generator, scale: float = 0.05) -> Format:
    kind = FORMATS[name]
    if name not in SCALES:
        numbers = (scale * rng.standard_normal((outputs, inputs))).astype(np.float32)
        stored: dict[str, np.ndarray] = {
            "F32": numbers,
            "F16": numbers.astype(np.float16),
            "BF16": (numbers.view(np.uint32) >> 16).astype(np.uint16),
        }
        return kind((outputs, inputs), stored[name].view(np.uint8).reshape(outputs, -1))
    blocks = rng.integers(0, 256, (outputs, inputs // kind.block, kind.block_bytes), dtype=np.uint8)
    for at in SCALES[name]:
        halves = (scale * rng.standard_normal((*blocks.shape[:2], 1))).astype(np.float16)
        blocks[:, :, at : at + 2] = halves.view(np.uint8)
    return kind((outputs, inputs), blocks.reshape(outputs, -1))


def like_a_model(name: str, outputs: int, inputs: int, spread: float, rng: np.random.Generator) -> Format:
    """Random codes and sub-scales as above, but numbers of mean 0 (in blocks with minima) and standard deviation
    `spread`, as the weights of a network have them."""
    if name not in SCALES:
        return random_weight(name, outputs, inputs, rng, spread)
    weight = random_weight(name, outputs, inputs, rng)
    blocks = weight.data.copy().reshape(-1, weight.block_bytes)
    shares = []
    for at in SCALES[name]:  # what the numbers are with one scale at 1 and the other at 0
        for other in SCALES[name]:
            blocks[:, other : other + 2] = np.array([at == other], np.float16).view(np.uint8)
        shares.append(weight.decode(blocks))
    scale = spread / shares[0].std()
    sizes = [scale, -scale * shares[0].mean() / shares[-1].mean()]
    for at, size in zip(SCALES[name], sizes, strict=False):
        halves = (size * (1 + 0.2 * rng.standard_normal((len(blocks), 1)))).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8)
    return FORMATS[name](weight.shape, blocks.reshape(outputs, -1))
