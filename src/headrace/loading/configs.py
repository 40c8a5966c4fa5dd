"""GGUF metadata as a config in Hugging Face's words. Where the file says nothing, llama.cpp's own defaults hold.

Knows keys, not tensors' contents, but for the small tensors that hold rotary divisors (rope_freqs and rope_factors_*).
Errors are ValueError; the caller adds the path.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.loading.source import Source
from headrace.models.facts import ConfigFacts
from headrace.models.parts import FULL, SLIDING

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

LAYER_TENSORS = 6
"""Least tensors of a layer: two norms, queries with keys and values, the way out of attention, gate with up, down."""

MOST_LAYERS = 1024
"""Far more than any model has."""

PER_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
"""Keys that may hold one number, or one per layer."""

OFF_AT_ZERO = (
    *("attention.key_length", "attention.sliding_window", "attention.scale"),
    *("attn_logit_softcapping", "final_logit_softcapping"),
    *("rope.scaling.factor", "rope.scale_linear", "rope.scaling.original_context_length", "rope.scaling.attn_factor"),
)
"""Keys whose 0 says that there is no such thing."""

MOST_DIVISORS = 1 << 15
"""Rotary divisors that are read: of heads far larger than any."""


def folder_config(source: Source) -> Mapping[str, Any]:
    """The config of a folder, its number of layers (also that of its text part) such that the tensors may hold them."""
    config = source.metadata
    for part in (config, config.get("text_config")):
        layers = part.get("num_hidden_layers") if isinstance(part, Mapping) else None
        if isinstance(layers, int):
            _bound_layers(source, "the config's num_hidden_layers", layers)
    return config


def gguf_config(source: Source) -> dict[str, Any]:
    """The config of a GGUF file. `norm_offset` is ours: 0, as the converter has added Gemma's 1 to the weights."""
    architecture = source.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"general.architecture {reprlib.repr(architecture)} is not supported: known are {known}")
    if "token_embd.weight" not in source.tensors:
        raise ValueError("there is no tensor token_embd.weight")
    own = _own(source.metadata, architecture)
    _refuse_unsupported(architecture, own)
    facts = ConfigFacts(own, within=architecture, called="the metadata")
    layers = facts.integer("block_count")
    _bound_layers(source, f"{architecture}.block_count", layers)
    heads, width, head_dim = facts.integer("attention.head_count"), facts.integer("embedding_length"), _head_dim(facts)
    config: dict[str, Any] = {
        "model_type": ARCHITECTURES[architecture],
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": facts.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": facts.integer("feed_forward_length"),
        "max_position_embeddings": facts.integer("context_length"),
        "rms_norm_eps": facts.factor("attention.layer_norm_rms_epsilon"),
        "vocab_size": source.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "rope_parameters": _rope(source, facts, head_dim, 1_000_000.0 if architecture == "gemma3" else 10_000.0),
    }
    if (trained := config["rope_parameters"].get("original_max_position_embeddings")) is not None:
        config["original_max_position_embeddings"] = trained
    if (eos := source.metadata.get("tokenizer.ggml.eos_token_id")) is not None:
        config["eos_token_id"] = eos
    window = facts.integer("attention.sliding_window") if facts.has("attention.sliding_window") else None
    match architecture:
        case "gemma2" | "gemma3":
            silent = architecture == "gemma2" and "attention.sliding_window" not in own
            _gemma(facts, config, 4096 if silent else window, own.get("attention.sliding_window_pattern"))
        case "llama" | "phi3":
            _one_window(config, window)
        case _ if window is not None and window < config["max_position_embeddings"]:
            raise ValueError(f"a sliding window of {window} tokens is not supported for {config['model_type']} in GGUF")
    return config


def _bound_layers(source: Source, key: str, layers: int) -> None:
    """Before anything is made for each layer: a number that is far too large costs nothing."""
    count = len(source.tensors)
    if layers > count // LAYER_TENSORS:
        most = f"{count} tensors make {count // LAYER_TENSORS} layers at most"
        raise ValueError(f"{key} is {reprlib.repr(layers)}, but {most}")
    if layers > MOST_LAYERS:
        raise ValueError(f"{key} is {layers}: must be at most {MOST_LAYERS}")


def _own(metadata: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The architecture's keys without its name: lists that hold the same number for every layer made that number, null
    where 0 means that there is none."""
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    for key in PER_LAYER:
        if isinstance(own.get(key), list | np.ndarray) and len(own[key]):
            first, *rest = _plain(own[key])
            if any(value != first for value in rest):
                raise ValueError(f"{prefix}{key} differs from layer to layer: not supported")
            own[key] = first
    return own | {key: None for key in OFF_AT_ZERO if key in own and _is(own[key], 0)}


def _plain(values: Any) -> list[Any]:
    """A list of plain values, whatever kind of array the reader gave."""
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def _is(value: Any, *wanted: bool | float) -> bool:
    """Whether a plain value is one of those: not an array of them, and no bool for a number or the other way round."""
    if not isinstance(value, bool | int | float):
        return False
    return any(isinstance(value, bool) is isinstance(one, bool) and value == one for one in wanted)


HARMLESS: Mapping[str, tuple[bool | float, ...]] = {
    "expert_count": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "use_parallel_residual": (False,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "rope.scaling.yarn_ext_factor": (1,),
}
"""Keys that change the answer in a way that cannot be run, but for these values."""


def _refuse_unsupported(architecture: str, own: Mapping[str, Any]) -> None:
    capped = {"attn_logit_softcapping": (0,)} if architecture == "gemma3" else {}
    for key, values in (*HARMLESS.items(), *capped.items()):
        if own.get(key) is not None and not _is(own[key], *values):
            raise ValueError(f"{architecture}.{key} is {reprlib.repr(own[key])}: not supported")


def _head_dim(facts: ConfigFacts) -> int:
    """Channels of a head, of queries, keys and values alike."""
    width, heads = facts.integer("embedding_length"), facts.integer("attention.head_count")
    if not facts.has("attention.key_length") and width < heads:
        raise ValueError(f"embedding_length {width} does not divide among {heads} heads, and there is no key_length")
    keys = facts.integer("attention.key_length", width // heads or 1)
    if (values := facts.integer("attention.value_length", keys)) != keys:
        raise ValueError(f"attention.value_length differs from key_length, {values} from {keys}: not supported")
    return keys


def _one_window(config: dict[str, Any], window: int | None) -> None:
    """One window in all layers: a Llama with one is a Mistral."""
    if window is not None:
        config["sliding_window"] = window
        if config["model_type"] == "llama":
            config["model_type"] = "mistral"


def _gemma(facts: ConfigFacts, config: dict[str, Any], window: int | None, pattern: Any) -> None:
    layers, second = config["num_hidden_layers"], config["model_type"] == "gemma2"
    config["sliding_window"] = window
    period = 2 if second else 6
    config["layer_types"] = [FULL] * layers if window is None else _layer_types(pattern, layers, period)
    config["norm_offset"] = 0.0
    config["final_logit_softcapping"] = facts.cap("final_logit_softcapping", 30.0 if second else None)
    if second:
        config["attn_logit_softcapping"] = facts.cap("attn_logit_softcapping", 50.0)
    else:
        local = {"rope_type": "default", "rope_theta": facts.number("rope.freq_base_swa", 10_000.0)}
        config["rope_parameters"] = {FULL: config["rope_parameters"], SLIDING: local}
    # The largest of either family scales by the width of a head's share, not by the head: only its depth tells.
    if facts.has("attention.scale"):
        config["query_pre_attn_scalar"] = facts.factor("attention.scale") ** -2
    elif layers == (46 if second else 62):
        config["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"]
    else:
        config["query_pre_attn_scalar"] = config["head_dim"]


def _layer_types(pattern: Any, layers: int, period: int) -> list[str]:
    """Every `period`-th layer is global, unless the file lists (true: local) or counts otherwise."""
    key = "attention.sliding_window_pattern"
    if isinstance(pattern, list | np.ndarray):
        local = _plain(pattern)
        if len(local) != layers:
            raise ValueError(f"{key} has {len(local)} entries for {layers} layers")
        if not all(_is(is_local, True, False, 0, 1) for is_local in local):
            raise ValueError(f"{key} is {reprlib.repr(local)}: must hold true or false for each layer")
        return [SLIDING if is_local else FULL for is_local in local]
    if pattern is None:
        pattern = period
    if not isinstance(pattern, int) or isinstance(pattern, bool):
        raise ValueError(f"{key} is {reprlib.repr(pattern)}: must be a whole number or a list of true and false")
    if pattern < 1:
        return [FULL] * layers
    return [SLIDING if (i + 1) % pattern else FULL for i in range(layers)]


# ---- rotation


def _rope(source: Source, facts: ConfigFacts, head_dim: int, base: float) -> dict[str, Any]:
    """`rope_parameters` from rope.* keys and divisor tensors; `base` where the file names none."""
    rope: dict[str, Any] = {"rope_theta": facts.number("rope.freq_base", base)}
    dim = facts.integer("rope.dimension_count", head_dim)
    if dim > head_dim:
        raise ValueError(f"rope.dimension_count is {dim}: a head has only {head_dim} channels")
    if dim != head_dim:
        rope["partial_rotary_factor"] = dim / head_dim
    factor = facts.factor("rope.scaling.factor", facts.factor("rope.scale_linear", 1.0))
    kind = facts.text("rope.scaling.type", "linear")
    trained = facts.integer("rope.scaling.original_context_length", facts.integer("context_length"))
    stretch = facts.factor("rope.scaling.attn_factor", 1.0)
    divisors = {name: _divisors(source, name, dim) for name in ROPE_TENSORS if name in source.tensors}
    if divisors and kind == "yarn":
        raise ValueError("rope.scaling.type is yarn and there is a tensor of rotary divisors: not supported together")
    match kind:
        case "yarn":
            return rope | {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": trained,
                "attention_factor": stretch * (0.1 * math.log(factor) + 1 if factor > 1 else 1.0),
                "beta_fast": facts.factor("rope.scaling.yarn_beta_fast", 32.0),
                "beta_slow": facts.factor("rope.scaling.yarn_beta_slow", 1.0),
            }
        case "longrope" if not divisors:
            raise ValueError("rope.scaling.type is longrope, but rope_factors_long and rope_factors_short are missing")
        case "none" | "linear" | "longrope":
            scale = factor if kind == "linear" else 1.0
        case _:
            raise ValueError(
                f"rope.scaling.type {reprlib.repr(kind)} is not supported: known are none, linear, yarn, longrope"
            )
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


def _divisors(source: Source, name: str, dim: int) -> list[float]:
    shape = source.tensors[name].shape
    if shape != (dim // 2,) or dim // 2 > MOST_DIVISORS:
        raise ValueError(f"{name} has the shape {shape}: must be a vector of {dim // 2} rotary divisors")
    return [float(x) for x in source.read(name).dense()]


def _divided(divisors: Mapping[str, list[float]], scale: float) -> dict[str, list[float]]:
    """Divisors for short and long contexts. rope_freqs (Llama 3.1) holds one set for both, which LongRoPE can say."""
    freqs, long, short = (divisors.get(name) for name in ROPE_TENSORS)
    if freqs is not None and (long or short):
        raise ValueError("both rope_freqs and rope_factors are there: only one can hold")
    long, short = long or freqs, short or freqs
    if long is None or short is None:
        raise ValueError("one of rope_factors_long and rope_factors_short is missing")
    return {"long_factor": [scale * x for x in long], "short_factor": [scale * x for x in short]}
