"""GGUF metadata as a config in Hugging Face's words. Where the file says nothing, llama.cpp's own defaults hold.

Knows keys, not tensors' contents, but for the small tensors that hold rotary divisors (rope_freqs and rope_factors_*).
Errors are ValueError; the caller adds the path.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.loading.source import Source

ARCHITECTURES: Mapping[str, str] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}
"""general.architecture to model_type."""

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are facts of the config, not weights: read here."""

FULL, SLIDING = "full_attention", "sliding_attention"


class _Keys:
    """The metadata of one architecture."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._metadata = metadata
        self._architecture = architecture

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `{architecture}.{key}`."""
        return self._metadata.get(f"{self._architecture}.{key}", default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ValueError(f"the metadata has no {self._architecture}.{key}")
        return value

    def one(self, key: str, default: Any = None) -> Any:
        """A number that may also be written once per layer, then always the same."""
        value = self.get(key, default)
        if value is None:
            raise ValueError(f"the metadata has no {self._architecture}.{key}")
        if isinstance(value, str | int | float):
            return value
        values = set(_plain(value))
        if len(values) != 1:
            raise ValueError(f"{self._architecture}.{key} differs from layer to layer: not supported")
        return values.pop()

    def refuse(self, key: str, *harmless: Any) -> None:
        """An error where the file uses something that would change the answer and cannot be run."""
        value = self.get(key)
        if value is not None and value not in harmless:
            raise ValueError(f"{self._architecture}.{key} is {value!r}: not supported")


def gguf_config(source: Source) -> dict[str, Any]:
    """The config of a GGUF file. `norm_offset` is ours: 0, as the converter has added Gemma's 1 to the weights."""
    architecture = source.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"general.architecture {architecture!r} is not supported: known are {known}")
    keys = _Keys(source.metadata, architecture)
    _refuse_unsupported(keys)
    if "token_embd.weight" not in source.tensors:
        raise ValueError("there is no tensor token_embd.weight")
    heads, width = keys.one("attention.head_count"), keys.need("embedding_length")
    head_dim = keys.get("attention.key_length") or width // max(heads, 1)
    if keys.get("attention.value_length", head_dim) != head_dim:
        raise ValueError(f"{architecture}.attention.value_length differs from key_length: not supported")
    config: dict[str, Any] = {
        "model_type": ARCHITECTURES[architecture],
        "hidden_size": width,
        "num_hidden_layers": keys.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.one("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": keys.one("feed_forward_length"),
        "max_position_embeddings": keys.need("context_length"),
        "rms_norm_eps": keys.need("attention.layer_norm_rms_epsilon"),
        "vocab_size": source.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "rope_parameters": _rope(source, keys, head_dim),
    }
    if (trained := config["rope_parameters"].get("original_max_position_embeddings")) is not None:
        config["original_max_position_embeddings"] = trained
    if (eos := source.metadata.get("tokenizer.ggml.eos_token_id")) is not None:
        config["eos_token_id"] = eos
    match architecture:
        case "gemma2" | "gemma3":
            _gemma(keys, config)
        case "llama" | "phi3":
            _window(keys, config)
        case _:
            _no_window(keys, config)
    return config


def _plain(value: Any) -> list[Any]:
    """A list of plain numbers, whatever kind of array the reader gave."""
    return [v.item() if isinstance(v, np.generic) else v for v in value]


def _refuse_unsupported(keys: _Keys) -> None:
    keys.refuse("expert_count", 0)
    keys.refuse("attention.causal", True)
    keys.refuse("attention.clamp_kqv", 0.0)
    keys.refuse("attention.max_alibi_bias", 0.0)
    keys.refuse("use_parallel_residual", False)
    keys.refuse("logit_scale", 0.0, 1.0)
    keys.refuse("residual_scale", 0.0, 1.0)
    keys.refuse("embedding_scale", 0.0, 1.0)
    keys.refuse("rope.scaling.yarn_log_multiplier", 0.0)
    keys.refuse("rope.scaling.yarn_ext_factor", 1.0)


def _window(keys: _Keys, config: dict[str, Any]) -> None:
    """One window in all layers (0: none): a Llama with one is a Mistral."""
    window = keys.get("attention.sliding_window") or None
    if window is not None:
        config["sliding_window"] = window
        if config["model_type"] == "llama":
            config["model_type"] = "mistral"


def _no_window(keys: _Keys, config: dict[str, Any]) -> None:
    window = keys.get("attention.sliding_window") or None
    if window is not None and window < config["max_position_embeddings"]:
        raise ValueError(f"a sliding window of {window} tokens is not supported for {config['model_type']} in GGUF")


def _gemma(keys: _Keys, config: dict[str, Any]) -> None:
    layers, second = config["num_hidden_layers"], config["model_type"] == "gemma2"
    window = keys.get("attention.sliding_window", 4096 if second else None) or None
    config["sliding_window"] = window
    config["layer_types"] = _layer_types(keys, layers, 2 if second else 6) if window else [FULL] * layers
    config["norm_offset"] = 0.0
    config["final_logit_softcapping"] = keys.get("final_logit_softcapping", 30.0 if second else None) or None
    if second:
        config["attn_logit_softcapping"] = keys.get("attn_logit_softcapping", 50.0) or None
    else:
        keys.refuse("attn_logit_softcapping", 0.0)
        local = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa", 10_000.0)}
        config["rope_parameters"] = {FULL: config["rope_parameters"], SLIDING: local}
    # The largest of either family scales by the width of a head's share, not by the head: only its depth tells.
    if scale := keys.get("attention.scale"):
        config["query_pre_attn_scalar"] = scale**-2
    elif layers == (46 if second else 62):
        config["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"]
    else:
        config["query_pre_attn_scalar"] = config["head_dim"]


def _layer_types(keys: _Keys, layers: int, period: int) -> list[str]:
    """Every `period`-th layer is global, unless the file lists (true: local) or counts otherwise."""
    pattern = keys.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, int) and not isinstance(pattern, bool):
        if pattern < 1:
            return [FULL] * layers
        return [SLIDING if (i + 1) % pattern else FULL for i in range(layers)]
    local = _plain(pattern)
    if len(local) != layers:
        raise ValueError(f"attention.sliding_window_pattern has {len(local)} entries for {layers} layers")
    return [SLIDING if is_local else FULL for is_local in local]


# ---- rotation


def _rope(source: Source, keys: _Keys, head_dim: int) -> dict[str, Any]:
    """`rope_parameters` from rope.* keys and divisor tensors."""
    gemma3 = source.metadata["general.architecture"] == "gemma3"
    rope: dict[str, Any] = {"rope_theta": keys.get("rope.freq_base", 1_000_000.0 if gemma3 else 10_000.0)}
    dim = keys.get("rope.dimension_count", head_dim)
    if dim != head_dim:
        rope["partial_rotary_factor"] = dim / head_dim
    factor = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1.0
    kind = keys.get("rope.scaling.type", "linear")
    trained = keys.get("rope.scaling.original_context_length") or keys.need("context_length")
    stretch = keys.get("rope.scaling.attn_factor") or 1.0
    divisors = {name: _divisors(source, name) for name in ROPE_TENSORS if name in source.tensors}
    if divisors and kind == "yarn":
        raise ValueError("rope.scaling.type is yarn and there is a tensor of rotary divisors: not supported together")
    match kind:
        case "yarn":
            return rope | {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": trained,
                "attention_factor": stretch * (0.1 * math.log(factor) + 1 if factor > 1 else 1.0),
                "beta_fast": keys.get("rope.scaling.yarn_beta_fast", 32.0),
                "beta_slow": keys.get("rope.scaling.yarn_beta_slow", 1.0),
            }
        case "longrope" if not divisors:
            raise ValueError("rope.scaling.type is longrope, but rope_factors_long and rope_factors_short are missing")
        case "none" | "linear" | "longrope":
            scale = factor if kind == "linear" else 1.0
        case _:
            raise ValueError(f"rope.scaling.type {kind!r} is not supported: known are none, linear, yarn, longrope")
    if divisors:
        return (
            rope
            | _divided(divisors, scale)
            | {
                "rope_type": "longrope",
                "original_max_position_embeddings": trained,
                "attention_factor": stretch,
            }
        )
    if stretch != 1.0:
        raise ValueError(f"rope.scaling.attn_factor {stretch} with rope.scaling.type {kind!r}: not supported")
    return rope | ({"rope_type": "linear", "factor": scale} if scale != 1.0 else {"rope_type": "default"})


def _divisors(source: Source, name: str) -> list[float]:
    tensor = source.read(name)
    if len(tensor.shape) != 1:
        raise ValueError(f"{name} has the shape {tensor.shape}: must be a vector of rotary divisors")
    return [float(x) for x in tensor.dense()]


def _divided(divisors: Mapping[str, list[float]], scale: float) -> dict[str, list[float]]:
    """Divisors for short and long contexts. rope_freqs (Llama 3.1) holds one set for both, which LongRoPE can say."""
    freqs, long, short = (divisors.get(name) for name in ROPE_TENSORS)
    if freqs is not None and (long or short):
        raise ValueError("both rope_freqs and rope_factors are there: only one can hold")
    long, short = long or freqs, short or freqs
    if long is None or short is None:
        raise ValueError("one of rope_factors_long and rope_factors_short is missing")
    return {"long_factor": [scale * x for x in long], "short_factor": [scale * x for x in short]}
