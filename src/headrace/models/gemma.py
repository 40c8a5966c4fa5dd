"""Gemma 2 and the text part of Gemma 3: norms before and after each branch, local and global layers in turn.

The config key `norm_offset` is ours: 0 says that the norms' weights come with the 1 already added, as in GGUF.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.models.facts import ConfigFacts
from headrace.models.parts import FULL, SLIDING, activation, layer_types
from headrace.models.rope import Rope, parse
from headrace.models.spec import Attention, Block, FeedForward, Spec

GLOBAL_THETA = 1_000_000.0
LOCAL_THETA = 10_000.0


def gemma2(config: Mapping[str, Any]) -> Spec:
    """Every other layer local, from the first on; scores and logits capped (50 and 30 unless the config says null)."""
    facts = ConfigFacts({"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4, **config})
    layers = facts.integer("num_hidden_layers")
    kinds = layer_types(facts, tuple(FULL if i % 2 else SLIDING for i in range(layers)))
    rope = parse(facts, facts.integer("head_dim"), theta=10_000.0)
    softcap = facts.cap("attn_logit_softcapping", 50.0)
    blocks = tuple(_block(facts, rope, local=kind == SLIDING, softcap=softcap) for kind in kinds)
    return _spec(facts, "gemma2", blocks, facts.cap("final_logit_softcapping", 30.0))


def gemma3_text(config: Mapping[str, Any]) -> Spec:
    """Every sixth layer global at base 1,000,000; the local ones at base 10,000, never stretched."""
    facts = ConfigFacts({"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4, **config})
    if facts.has("attn_logit_softcapping"):
        raise ValueError("attn_logit_softcapping is not part of gemma3_text: must be null")
    layers, dim = facts.integer("num_hidden_layers"), facts.integer("head_dim")
    period = facts.integer("sliding_window_pattern", facts.integer("_sliding_window_pattern", 6))
    kinds = layer_types(facts, tuple(SLIDING if (i + 1) % period else FULL for i in range(layers)))
    ropes = {FULL: parse(facts, dim, theta=GLOBAL_THETA, layer_type=FULL), SLIDING: _local_rope(facts, dim)}
    blocks = tuple(_block(facts, ropes[kind], local=kind == SLIDING, softcap=None) for kind in kinds)
    return _spec(facts, "gemma3_text", blocks, facts.cap("final_logit_softcapping", None))


def gemma3(config: Mapping[str, Any]) -> Spec:
    """The wrapper of a checkpoint that was made for images too: its text part. Tensors for images are refused later."""
    text = ConfigFacts(config).mapping("text_config")
    if text is None:
        raise ValueError("the config of a gemma3 has no text_config")
    return gemma3_text({"vocab_size": 262_208, "max_position_embeddings": 131_072, **text})


def _local_rope(facts: ConfigFacts, dim: int) -> Rope:
    theta = facts.number("rope_local_base_freq", LOCAL_THETA)
    nested = (facts.mapping("rope_parameters") or {}).get(SLIDING)
    if nested is None:
        return Rope(theta, dim)
    context = {"max_position_embeddings": facts.integer("max_position_embeddings")}
    return parse(ConfigFacts({**context, "rope_parameters": {SLIDING: nested}}), dim, theta=theta, layer_type=SLIDING)


def _block(facts: ConfigFacts, rope: Rope, *, local: bool, softcap: float | None) -> Block:
    attention = Attention(
        heads=facts.integer("num_attention_heads"),
        kv_heads=facts.integer("num_key_value_heads"),
        dim=facts.integer("head_dim"),
        rope=rope,
        scale=facts.factor("query_pre_attn_scalar", 256) ** -0.5,
        window=facts.integer("sliding_window", 4096) if local else None,
        softcap=softcap,
    )
    act = activation(facts, "hidden_activation", default="gelu_pytorch_tanh")
    return Block(attention, FeedForward(facts.integer("intermediate_size"), act), post_norms=True)


def _spec(facts: ConfigFacts, family: str, blocks: tuple[Block, ...], softcap: float | None) -> Spec:
    if facts.flag("use_bidirectional_attention", default=False):
        raise ValueError("use_bidirectional_attention is true: only causal models can be run")
    width = facts.integer("hidden_size")
    return Spec(
        family=family,
        width=width,
        vocab=facts.integer("vocab_size"),
        context=facts.integer("max_position_embeddings"),
        eps=facts.factor("rms_norm_eps", 1e-6),
        blocks=blocks,
        norm_offset=facts.number("norm_offset", 1.0),
        embed_scale=width**0.5,
        logit_softcap=softcap,
        tied=facts.flag("tie_word_embeddings", default=True),
    )
