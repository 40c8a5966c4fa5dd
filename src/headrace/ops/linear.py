"""The linear map."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from headrace.ops import signatures
from headrace.ops.op import Case, Op


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x float32 [n, in], weight float32 [out, in], bias float32 [out] → float32 [n, out]."""
    return torch.nn.functional.linear(x, weight, bias)


def _cases(rng: np.random.Generator) -> Iterator[Case]:
    for name, n, inputs, outputs in [("one", 1, 48, 40), ("many", 17, 96, 33), ("none", 0, 8, 4)]:
        x = rng.standard_normal((n, inputs), np.float32)
        weight = rng.standard_normal((outputs, inputs), np.float32)
        yield Case(name, (x,), (weight,))
        yield Case(name + " with bias", (x,), (weight, rng.standard_normal(outputs, np.float32)))


LINEAR = Op(signatures.LINEAR, linear, _cases, 2e-6)
