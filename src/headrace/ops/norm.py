"""Normalization."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from headrace.ops import signatures
from headrace.ops.op import Case, Op


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, offset: float) -> Tensor:
    """RMS norm (Zhang and Sennrich 2019) of each stretch of the weight's length: x / rms(x) × (weight + offset).

    x float32 [n, width], weight float32 [dim] with width a multiple of dim (dim is the head size where queries or keys
    are normed head by head) → float32 [n, width].
    """
    parts = x.view(len(x), x.shape[1] // len(weight), len(weight))
    scale = torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + eps)
    normed: Tensor = parts * scale * (weight + offset if offset else weight)
    return normed.view(x.shape)


def _cases(rng: np.random.Generator) -> Iterator[Case]:
    for name, n, width, dim, eps, offset in [
        ("whole line", 5, 48, 48, 1e-5, 0.0),
        ("by head, weight less one", 3, 64, 16, 1e-6, 1.0),
        ("eps matters", 2, 32, 32, 0.5, 0.0),
    ]:
        weight = (1 - offset + 0.3 * rng.standard_normal(dim)).astype(np.float32)
        yield Case(name, (rng.standard_normal((n, width), np.float32),), (weight,), {"eps": eps, "offset": offset})
    outlier = rng.standard_normal((2, 32), np.float32)
    outlier[0, 3] = 1e5
    yield Case("outlier", (outlier,), (np.ones(32, np.float32),), {"eps": 1e-6, "offset": 0.0})


RMS_NORM = Op(signatures.RMS_NORM, rms_norm, _cases, 1e-6)
