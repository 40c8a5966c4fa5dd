"""A model as data: a flat list of coarse operations on named buffers.

A `Program` is written once by the decoder and run by a backend; it knows no device, no batch and no number format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np


class Extent(Enum):
    """What a buffer's first dimension counts."""

    TOKENS = "tokens"
    """Every token of the plan."""
    WANTED = "wanted"
    """The tokens whose hidden state or logits somebody wants."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """[extent, width] of 4-byte numbers: float32, or int32 [extent] for the three inputs of the body."""

    name: str
    extent: Extent
    width: int


TOKENS = Buffer("tokens", Extent.TOKENS, 1)
"""Token ids; given, as the next two: `Batch` has them under the same names."""
POSITIONS = Buffer("positions", Extent.TOKENS, 1)
"""Absolute positions."""
WANTED = Buffer("wanted", Extent.WANTED, 1)
"""Indices of the wanted tokens."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: which, on what, with what."""

    kind: str
    """A name in `ops.signatures.SIGNATURES`."""
    inputs: tuple[str, ...]
    output: str | None
    """None where it only writes the KV pool."""
    weights: tuple[str, ...] = ()
    """Names of weights or constants, in the operation's own order; an absent optional one (a bias) is not listed."""
    attrs: Mapping[str, Any] = field(default_factory=dict)
    """Numbers and strings that the operation's signature names."""
    layer: int | None = None
    """Of operations on the KV pool: `KVLayout.place` says where its keys and values are."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table per request: they have the same window."""

    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How the layers' keys and values lie in the pool.

    The pool is one array per slot, [blocks, 2 (key, value), kv_heads, block tokens, dim]. A block id names the same
    place in every slot. A group uses at most one slot per layer, so a block of any group has the same size and all
    groups draw from one free list.
    """

    groups: tuple[KVGroup, ...]
    slots: int
    kv_heads: int
    dim: int

    def place(self, layer: int) -> tuple[int, int]:
        """(group, slot) of a layer."""
        for g, group in enumerate(self.groups):
            if layer in group.layers:
                return g, group.layers.index(layer)
        raise KeyError(layer)


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """The whole model.

    `body` turns token ids into final, normed hidden states of the wanted tokens; `head` turns those into logits and is
    run apart, in slices where there are many.
    """

    body: tuple[Operation, ...]
    head: tuple[Operation, ...]
    buffers: Mapping[str, Buffer]
    """Every buffer by name. Each is written once, by the input or by one operation before it is read."""
    constants: Mapping[str, np.ndarray]
    """float32 arrays that were computed when the program was written (rotary frequencies); used like weights."""
    kv: KVLayout
    heads: int
    """Query heads of an attention: sizes the workspace."""
    hidden: str
    """The buffer that `body` ends in: [wanted, model width]."""
    logits: str
    """The buffer that `head` ends in: [wanted, vocab]."""
    width: int
    vocab: int
    """Width of the logits: the bound of every token id, whatever the tokenizer says."""
