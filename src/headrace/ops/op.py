"""`Op`, the seam for who computes an operation. Knows no program and no model; importing it does not import PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.ops.signatures import Signature

Implementation = Callable[..., Any]
"""Called with the inputs and weights in the signature's order, then the attributes (and `index`, `pool` where the
operation reads or writes keys and values) by keyword; returns the output, or None where there is none."""


@dataclass(frozen=True, eq=False)
class Case:
    """One call, as data. Arrays are float32 or int32 NumPy arrays."""

    name: str
    inputs: tuple[np.ndarray, ...]
    weights: tuple[np.ndarray, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    kv: KVCase | None = None
    """For operations on the KV pool."""


@dataclass(frozen=True, eq=False)
class KVCase:
    """The rows of a call and the pool they lie in."""

    pool: np.ndarray
    """uint8 [blocks, bytes] as `ops.kv.Stored` has it, as it is before the call. Blocks are of 32 tokens."""
    kv_format: str
    kv_heads: int
    dim: int
    positions: np.ndarray
    """int32 [tokens]."""
    offsets: np.ndarray
    """int32 [rows + 1]."""
    lengths: np.ndarray
    """int32 [rows]."""
    table: np.ndarray
    """int32 [rows, most blocks]; -1 where there is none."""
    window: int | None


@dataclass(frozen=True, eq=False)
class Op:
    """One kind of operation: what it is, who computes it, and how that is judged."""

    signature: Signature
    reference: Implementation
    """In PyTorch: the readable definition."""
    cases: Callable[[np.random.Generator], Iterator[Case]]
    """Calls that every implementation is tested with."""
    tolerance: float
    """Largest difference allowed between an implementation and exact arithmetic, as a share of the largest |value|."""
    implementations: Mapping[str, Implementation] = field(default_factory=dict)
    """Other implementations in Python by name; the native kernels are tested with the same cases."""
