"""What a model family comes down to: frozen data, no code that runs. Knows neither files nor weights nor programs.

A family (one file each beside this one) is a function from a config in Hugging Face's words to a `Spec`. Whether there
are biases, norms of queries and keys, or a head of its own is not said here: the checkpoint's tensors say it.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.models.rope import Rope

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Activations that can be run: the config's word to the operation's."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention with grouped heads (GQA, Ainslie et al. 2023; MHA and MQA are its ends)."""

    heads: int
    kv_heads: int
    dim: int
    """Channels of one head, of queries, keys and values alike."""
    rope: Rope
    scale: float
    """Factor on the dot product of query and key."""
    window: int | None = None
    """A token sees itself and the `window` - 1 tokens before it; None: everything before it."""
    softcap: float | None = None
    """Scores become softcap × tanh(score / softcap) before the mask."""

    def __post_init__(self) -> None:
        if self.heads < 1 or self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} attention heads cannot share {self.kv_heads} key-value heads evenly")
        if self.dim < 2 or self.dim % 2:
            raise ValueError(f"a head of {self.dim} channels: must be even and at least 2")
        if self.rope.dim > self.dim:
            raise ValueError(f"rotary embedding over {self.rope.dim} channels of a head that has {self.dim}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"a sliding window of {self.window} tokens: must be at least 1")


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Gated feed-forward (GLU variants, Shazeer 2020): down(activation(gate(x)) × up(x))."""

    hidden: int
    activation: str
    """silu or gelu_tanh."""


@dataclass(frozen=True, slots=True)
class Block:
    """Attention, then feed-forward, each on the normed residual stream and added back to it."""

    attention: Attention
    feed_forward: FeedForward
    post_norms: bool = False
    """Each branch's result is normed again before it is added (Gemma 2 and 3)."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A decoder-only language model."""

    family: str
    """The config's model_type."""
    width: int
    """Channels of the residual stream."""
    vocab: int
    """Width of the logits and lines of the embedding."""
    context: int
    """Tokens the model was made for."""
    eps: float
    """Of every RMS norm (Zhang and Sennrich 2019)."""
    blocks: tuple[Block, ...]
    norm_offset: float = 0.0
    """Added to every norm's weight: 1 where the checkpoint stores w - 1."""
    embed_scale: float = 1.0
    logit_softcap: float | None = None
    tied: bool = False
    """Where the checkpoint has no head, the embedding is the head; otherwise such a checkpoint is broken."""

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ValueError("a model of no blocks")
        shapes = {(b.attention.kv_heads, b.attention.dim) for b in self.blocks}
        if len(shapes) > 1:
            raise ValueError(f"layers differ in key-value heads or head size, {sorted(shapes)}: not supported")
