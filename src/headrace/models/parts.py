"""Parts that several families word alike in their configs."""

from __future__ import annotations

from headrace.models.facts import ConfigFacts
from headrace.models.rope import Rope, parse
from headrace.models.spec import ACTIVATIONS, Attention, Block, FeedForward, Spec

FULL = "full_attention"
SLIDING = "sliding_attention"


def head_dim(facts: ConfigFacts) -> int:
    """Channels of one head; where the config is silent, the width divided among the heads."""
    if facts.has("head_dim"):
        return facts.integer("head_dim")
    width, heads = facts.integer("hidden_size"), facts.integer("num_attention_heads")
    if width % heads:
        raise ValueError(f"hidden_size {width} does not divide among {heads} attention heads, and there is no head_dim")
    return width // heads


def attention(facts: ConfigFacts, rope: Rope, *, window: int | None) -> Attention:
    """Attention scaled by 1 / sqrt(head size), as in every family but Gemma."""
    heads, dim = facts.integer("num_attention_heads"), head_dim(facts)
    return Attention(
        heads=heads,
        kv_heads=facts.integer("num_key_value_heads", heads),
        dim=dim,
        rope=rope,
        scale=dim**-0.5,
        window=window,
    )


def activation(facts: ConfigFacts, *keys: str, default: str) -> str:
    """The first of `keys` that the config has, as the operation spells it."""
    word = next((facts.text(key) for key in keys if facts.has(key)), default)
    if word not in ACTIVATIONS:
        raise ValueError(f"the activation {word!r} is not supported: known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[word]


def layer_types(facts: ConfigFacts, default: tuple[str, ...]) -> tuple[str, ...]:
    """`layer_types` as the config lists them, one per layer, else `default`."""
    kinds = facts.texts("layer_types", facts.integer("num_hidden_layers")) or default
    if unknown := sorted(set(kinds) - {FULL, SLIDING}):
        raise ValueError(f"layer_types has {unknown[0]!r}: known are {FULL} and {SLIDING}")
    return kinds


def windowed(facts: ConfigFacts) -> tuple[int | None, ...]:
    """Windows as Qwen words them: only with use_sliding_window, and then from layer max_window_layers on."""
    layers = facts.integer("num_hidden_layers")
    if not facts.flag("use_sliding_window", default=False):
        return (None,) * layers
    first = facts.number("max_window_layers", 28)
    kinds = layer_types(facts, tuple(SLIDING if i >= first else FULL for i in range(layers)))
    return tuple(facts.integer("sliding_window") if kind == SLIDING else None for kind in kinds)


def uniform(facts: ConfigFacts, family: str, windows: tuple[int | None, ...], *, theta: float = 10_000.0) -> Spec:
    """A pre-norm decoder whose layers differ in their window at most: Llama and what follows it."""
    rope = parse(facts, head_dim(facts), theta=theta)
    feed_forward = FeedForward(
        facts.integer("intermediate_size"), activation(facts, "hidden_act", "hidden_activation", default="silu")
    )
    return Spec(
        family=family,
        width=facts.integer("hidden_size"),
        vocab=facts.integer("vocab_size"),
        context=facts.integer("max_position_embeddings"),
        eps=facts.factor("rms_norm_eps", 1e-6),
        blocks=tuple(Block(attention(facts, rope, window=window), feed_forward) for window in windows),
        tied=facts.flag("tie_word_embeddings", default=False),
    )
