"""Writes a `Spec` and the names of a checkpoint's weights into a `Program`. Reads as the papers do; computes nothing.

Names of weights: embed.weight, then for each layer N the prefix `layers.N.` with attn_norm, attn.q, attn.k, attn.v
(weight, bias), attn.q_norm, attn.k_norm, attn.o, attn_post_norm, ffn_norm, ffn.gate, ffn.up, ffn.down, ffn_post_norm,
then norm.weight and head.weight. What is optional (biases, norms of queries and keys, the head) is used where its name
is there.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from headrace.models.rope import Rope, frequencies
from headrace.models.spec import Attention, Block, FeedForward, Spec
from headrace.program.layout import kv_layout
from headrace.program.program import POSITIONS, TOKENS, WANTED, Buffer, Extent, Operation, Program

EMBED = "embed.weight"
HEAD = "head.weight"
NORM = "norm.weight"


def write_program(spec: Spec, weights: Collection[str], context: int) -> Program:
    """The program of a model for contexts of up to `context` tokens, which fixes the rotary frequencies.

    `weights` has the canonical names that the checkpoint fills (`loading.names`); only which optional ones are there is
    asked of it.
    """
    return _Decoder(spec, weights, context).program()


class _Decoder:
    """A program under construction."""

    def __init__(self, spec: Spec, weights: Collection[str], context: int) -> None:
        self.spec = spec
        self.weights = weights
        self.context = context
        attentions = [block.attention for block in spec.blocks]
        self.kv = kv_layout([a.window for a in attentions], attentions[0].kv_heads, attentions[0].dim, context)
        self.ops: list[Operation] = []
        self.buffers = {b.name: b for b in (TOKENS, POSITIONS, WANTED)}
        self.ropes = list(dict.fromkeys(a.rope for a in attentions))
        self.constants: dict[str, np.ndarray] = {}

    def program(self) -> Program:
        spec = self.spec
        for number, rope in enumerate(self.ropes):
            self.angles(number, rope)
        x = self.op("embed", TOKENS.name, out="embed", width=spec.width, weights=(EMBED,), scale=spec.embed_scale)
        for layer, block in enumerate(spec.blocks):
            x = self.block(layer, block, x)
        x = self.op("select", x, WANTED.name, out="last", width=spec.width, extent=Extent.WANTED)
        hidden = self.norm(x, NORM, out="hidden")
        body, self.ops = tuple(self.ops), []
        logits = self.head(hidden)
        return Program(
            body=body,
            head=tuple(self.ops),
            buffers=self.buffers,
            constants=self.constants,
            kv=self.kv,
            heads=max(block.attention.heads for block in spec.blocks),
            hidden=hidden,
            logits=logits,
            width=spec.width,
            vocab=spec.vocab,
        )

    def block(self, layer: int, block: Block, x: str) -> str:
        at = f"layers.{layer}."
        branch = self.attention(layer, block.attention, self.norm(x, f"{at}attn_norm.weight"))
        if block.post_norms:
            branch = self.norm(branch, f"{at}attn_post_norm.weight")
        x = self.add(x, branch, out=f"{at}attn.sum")
        branch = self.feed_forward(at, block.feed_forward, self.norm(x, f"{at}ffn_norm.weight"))
        if block.post_norms:
            branch = self.norm(branch, f"{at}ffn_post_norm.weight")
        return self.add(x, branch, out=f"{at}ffn.sum")

    def attention(self, layer: int, a: Attention, x: str) -> str:
        at = f"layers.{layer}.attn."
        q = self.linear(x, f"{at}q", a.heads * a.dim)
        k = self.linear(x, f"{at}k", a.kv_heads * a.dim)
        v = self.linear(x, f"{at}v", a.kv_heads * a.dim)
        if f"{at}q_norm.weight" in self.weights:
            q = self.norm(q, f"{at}q_norm.weight")
            k = self.norm(k, f"{at}k_norm.weight")
        q, k = (self.rotate(z, a, out=f"{at}{name}_turned") for z, name in ((q, "q"), (k, "k")))
        self.op("store", k, v, out=None, layer=layer)
        mixed = self.op(
            "attend", q, out=f"{at}mixed", width=a.heads * a.dim, layer=layer, scale=a.scale, softcap=a.softcap
        )
        return self.linear(mixed, f"{at}o", self.spec.width)

    def feed_forward(self, at: str, f: FeedForward, x: str) -> str:
        gate = self.linear(x, f"{at}ffn.gate", f.hidden)
        up = self.linear(x, f"{at}ffn.up", f.hidden)
        gated = self.op("gated", gate, up, out=f"{at}ffn.gated", width=f.hidden, activation=f.activation)
        return self.linear(gated, f"{at}ffn.down", self.spec.width)

    def head(self, hidden: str) -> str:
        spec = self.spec
        weight = HEAD if HEAD in self.weights else EMBED
        raw = "logits" if spec.logit_softcap is None else "logits.raw"
        logits = self.op("linear", hidden, out=raw, width=spec.vocab, weights=(weight,))
        if spec.logit_softcap is None:
            return logits
        return self.op("softcap", logits, out="logits", width=spec.vocab, cap=spec.logit_softcap)

    # ---- single operations

    def op(
        self,
        kind: str,
        *inputs: str,
        out: str | None,
        width: int = 0,
        weights: tuple[str, ...] = (),
        layer: int | None = None,
        extent: Extent | None = None,
        **attrs: Any,
    ) -> str:
        """Append an operation; its output counts what its first input counts unless `extent` says otherwise."""
        if out is not None:
            self.buffers[out] = Buffer(out, extent or self.buffers[inputs[0]].extent, width)
        self.ops.append(Operation(kind, inputs, out, weights, attrs, layer))
        return out or ""

    def angles(self, number: int, rope: Rope) -> None:
        table, factor = frequencies(rope, self.context)
        name = f"rope.{number}.frequencies"
        self.constants[name] = table
        self.op("angles", POSITIONS.name, out=f"rope.{number}", width=rope.dim, weights=(name,), factor=float(factor))

    def rotate(self, x: str, a: Attention, out: str) -> str:
        turns = f"rope.{self.ropes.index(a.rope)}"
        return self.op("rotate", x, turns, out=out, width=self.buffers[x].width, dim=a.dim)

    def norm(self, x: str, weight: str, out: str | None = None) -> str:
        return self.op(
            "rms_norm",
            x,
            out=out or weight.removesuffix(".weight"),
            width=self.buffers[x].width,
            weights=(weight,),
            eps=self.spec.eps,
            offset=self.spec.norm_offset,
        )

    def linear(self, x: str, name: str, width: int) -> str:
        bias = (f"{name}.bias",) if f"{name}.bias" in self.weights else ()
        return self.op("linear", x, out=name, width=width, weights=(f"{name}.weight", *bias))

    def add(self, x: str, y: str, out: str) -> str:
        return self.op("add", x, y, out=out, width=self.buffers[x].width)
