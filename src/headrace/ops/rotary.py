"""Rotary position embedding: the angles once per step, then the rotation of queries and of keys."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from headrace.ops import signatures
from headrace.ops.op import Case, Op


def angles(positions: Tensor, frequencies: Tensor, *, factor: float) -> Tensor:
    """Cosines, then sines, of float32(position) × float32(frequency), times `factor`.

    positions int32 [n], frequencies float32 [half] → float32 [n, 2 × half].
    """
    turned = positions.to(torch.float32)[:, None] * frequencies
    both = torch.cat((turned.cos(), turned.sin()), 1)
    return both if factor == 1.0 else both * factor


def rotate(x: Tensor, turns: Tensor, *, dim: int) -> Tensor:
    """Turn the first channels of every head: channel i with channel i + half, by the angle of its position.

    x float32 [n, heads × dim], turns float32 [n, 2 × half] (of `angles`), 2 × half <= dim; the other channels of a head
    stay as they are. → float32 [n, heads × dim]. (RoFormer, Su et al. 2021, in the layout of GPT-NeoX.)
    """
    half = turns.shape[1] // 2
    cos, sin = turns[:, None, :half], turns[:, None, half:]
    heads = x.view(len(x), x.shape[1] // dim, dim)
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1).flatten(1)


def _angles_cases(rng: np.random.Generator) -> Iterator[Case]:
    frequencies = (1 / 10_000.0 ** (np.arange(8) / 8)).astype(np.float32)
    for name, positions, factor in [("near", [0, 1, 2, 31], 1.0), ("far", [1000, 9000, 131_071], 1.19)]:
        yield Case(name, (np.array(positions, np.int32),), (frequencies,), {"factor": factor})


def _rotate_cases(rng: np.random.Generator) -> Iterator[Case]:
    for name, n, heads, dim, half in [("whole head", 4, 3, 16, 8), ("part of the head", 1, 2, 24, 8)]:
        x = rng.standard_normal((n, heads * dim), np.float32)
        turn = rng.standard_normal((n, half), np.float32)
        turns = np.concatenate((np.cos(turn), np.sin(turn)), 1)
        yield Case(name, (x, turns), attrs={"dim": dim})


ANGLES = Op(signatures.ANGLES, angles, _angles_cases, 2e-7)
ROTATE = Op(signatures.ROTATE, rotate, _rotate_cases, 5e-7)
