"""Operations on each number by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from headrace.ops import signatures
from headrace.ops.op import Case, Op

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}


def add(x: Tensor, y: Tensor) -> Tensor:
    """float32 [n, width] twice → their sum."""
    return x + y


def gated(gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
    """activation(gate) × up (Shazeer 2020): float32 [n, hidden] twice → float32 [n, hidden].

    `activation` is silu (x / (1 + e^-x)) or gelu_tanh (Hendrycks and Gimpel 2016, the tanh form).
    """
    return ACTIVATIONS[activation](gate) * up


def softcap(x: Tensor, *, cap: float) -> Tensor:
    """cap × tanh(x / cap): float32 [n, width] → the same shape."""
    return torch.tanh(x / cap) * cap


def _pair(rng: np.random.Generator, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    x, y = (scale * rng.standard_normal((4, 33), np.float32) for _ in range(2))
    return x, y


def _add_cases(rng: np.random.Generator) -> Iterator[Case]:
    yield Case("plain", _pair(rng))
    yield Case("outlier", _pair(rng, 1e5))


def _gated_cases(rng: np.random.Generator) -> Iterator[Case]:
    for activation in ACTIVATIONS:
        yield Case(activation, _pair(rng, 3.0), attrs={"activation": activation})
        yield Case(f"{activation}, far out", _pair(rng, 100.0), attrs={"activation": activation})


def _softcap_cases(rng: np.random.Generator) -> Iterator[Case]:
    yield Case("plain", _pair(rng, 20.0)[:1], attrs={"cap": 30.0})


ADD = Op(signatures.ADD, add, _add_cases, 1e-7)
GATED = Op(signatures.GATED, gated, _gated_cases, 1e-6)
SOFTCAP = Op(signatures.SOFTCAP, softcap, _softcap_cases, 1e-6)
