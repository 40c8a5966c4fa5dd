"""What the work of a line takes at least: bytes to read, products to add, counted from the model's file."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from bench.peers.lines import START, Line
from bench.peers.machine import Machine
from headrace.loading.gguf import GGUF

EMBEDDING = "token_embd.weight"

KV_BYTES = 2
"""Of one cached element, bf16 or f16."""


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of one dense model."""

    weights: int
    """Bytes that a step reads of the file: all but an embedding that is no head."""
    products: int
    """Multiplications of one token in all linears but the head."""
    head: int
    """In the head, for a row whose logits are wanted."""
    attended: int
    """In attention, for one pair of query and key positions."""
    kv: int
    """Bytes cached for one token."""


@dataclass(frozen=True, slots=True)
class Work:
    """Of one step, on average."""

    tokens: int
    """That it computes, and that the line's figure counts."""
    weights: int
    kv: float
    products: float

    def seconds(self, machine: Machine) -> float:
        """The least that it takes: reading or multiplying, whichever is longer, the other one hidden behind it."""
        return max((self.weights + self.kv) / machine.read(self.weights), self.products / machine.int8)


def sizes(path: Path) -> Model:
    """ValueError for mixtures of experts, whose steps read what the router chooses."""
    file = GGUF(path)
    tensors, metadata = file.tensors, file.metadata
    file.close()
    if any(len(t.shape) > 2 for t in tensors.values()):
        raise ValueError(f"{path.name}: experts are not counted")
    kind = metadata["general.architecture"]
    layers, heads = (int(metadata[f"{kind}.{name}"]) for name in ("block_count", "attention.head_count"))
    kv_heads = int(metadata.get(f"{kind}.attention.head_count_kv", heads))
    default = int(metadata[f"{kind}.embedding_length"]) // heads
    dim = int(metadata.get(f"{kind}.attention.key_length", default))
    head = "output.weight" if "output.weight" in tensors else EMBEDDING
    linears = [t for t in tensors.values() if t.name.startswith("blk.") and len(t.shape) == 2]
    return Model(
        weights=sum(t.nbytes for t in tensors.values() if t.name == head or t.name != EMBEDDING),
        products=sum(prod(t.shape) for t in linears),
        head=prod(tensors[head].shape),
        attended=2 * layers * heads * dim,
        kv=2 * layers * kv_heads * dim * KV_BYTES,
    )


def work(line: Line, model: Model) -> Work | None:
    """The step that the line repeats; None for the start."""
    if line is START:
        return None
    if line.new == 1:
        pairs = line.prompt * (line.prompt + 1) / 2
        products = line.prompt * model.products + model.head + pairs * model.attended
        return Work(line.prompt, model.weights, line.prompt * model.kv, products)
    before = line.prompt + line.new / 2
    each = model.products + model.head + before * model.attended
    return Work(line.streams, model.weights, line.streams * before * model.kv, line.streams * each)
