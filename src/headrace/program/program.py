"""A model as data: a flat list of coarse operations on named buffers.

A `Program` is written once by the decoder and run by a backend; it knows no device, no batch and no number format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Extent(Enum):
    """What a buffer's first dimension counts."""

    TOKENS = "tokens"
    """Every token of the plan."""
    WANTED = "wanted"
    """The tokens whose hidden state or logits somebody wants."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """float32 (int32 for token ids and positions) [extent, width]."""

    name: str
    extent: Extent
    width: int


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: which, on what, with what."""

    kind: str
    """A name in `ops.OPS`."""
    inputs: tuple[str, ...]
    output: str
    weights: tuple[str, ...] = ()
    """Names of weights, in the operation's own order; an absent optional weight (a bias) is simply not listed."""
    attrs: Mapping[str, Any] = field(default_factory=dict)
    """Numbers and strings that the operation's signature names."""
    layer: int | None = None


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


@dataclass(frozen=True, slots=True)
class Program:
    """The whole model.

    `body` turns token ids into final, normed hidden states of the wanted tokens; `head` turns those into logits and is
    run apart, in slices where there are many.
    """

    body: tuple[Operation, ...]
    head: tuple[Operation, ...]
    buffers: Mapping[str, Buffer]
    kv: KVLayout
    hidden: str
    """The buffer that `body` ends in: [wanted, model width]."""
    logits: str
    """The buffer that `head` ends in: [wanted, vocab]."""
    width: int
    vocab: int
    """Width of the logits: the bound of every token id, whatever the tokenizer says."""
