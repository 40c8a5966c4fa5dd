"""What the work of a line takes at least: bytes to read, products to add, counted from the model's file."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from bench.peers.lines import START, Line
from bench.peers.machine import Machine
from headrace.loading.checkpoint import open_checkpoint
from headrace.program.decoder import write_program

PROMPT_AND_ANSWER = 1024
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
    int8: bool
    """Can products be those of int8, or are weights and inputs wider?"""


@dataclass(frozen=True, slots=True)
class Work:
    """Of one step, on average."""

    tokens: int
    """That it computes, and that the line's figure counts."""
    weights: int
    kv: float
    products: float
    int8: bool

    def multiplied(self, machine: Machine) -> float:
        """Products per second that the machine can do of this kind."""
        return machine.int8 if self.int8 else machine.float32

    def seconds(self, machine: Machine) -> float:
        """The least that it takes: reading or multiplying, whichever is longer, the other one hidden behind it."""
        return max((self.weights + self.kv) / machine.read(self.weights), self.products / self.multiplied(machine))


def sizes(path: Path) -> Model:
    """Of a GGUF file or a folder of safetensors; in a folder products count as float32."""
    checkpoint = open_checkpoint(path)
    program = write_program(checkpoint.spec, checkpoint.parts, PROMPT_AND_ANSWER)
    tensors, parts = checkpoint.source.tensors, checkpoint.parts
    read = {
        parts[w].tensor for op in (*program.body, *program.head) if op.kind != "embed" for w in op.weights if w in parts
    }
    body, head = (
        sum(prod(parts[op.weights[0]].shape) for op in ops if op.kind == "linear")
        for ops in (program.body, program.head)
    )
    checkpoint.source.close()
    kv = program.kv
    layers = len(kv.groups) * kv.slots
    return Model(
        weights=sum(tensors[name].nbytes for name in read),
        products=body,
        head=head,
        attended=2 * layers * program.heads * kv.dim,
        kv=2 * layers * kv.kv_heads * kv.dim * KV_BYTES,
        int8=path.is_file(),
    )


def work(line: Line, model: Model) -> Work | None:
    """The step that the line repeats; None for the start."""
    if line is START:
        return None
    if line.new == 1:
        pairs = line.prompt * (line.prompt + 1) / 2
        products = line.prompt * model.products + model.head + pairs * model.attended
        return Work(line.prompt, model.weights, line.prompt * model.kv, products, model.int8)
    before = line.prompt + line.new / 2
    each = model.products + model.head + before * model.attended
    return Work(line.streams, model.weights, line.streams * before * model.kv, line.streams * each, model.int8)
