"""GGUF files out of tiny safetensors checkpoints, by the rules of llama.cpp's converter: the tests' own converter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from headrace.formats.format import Format

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
}


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """What the converter does to a llama's queries and keys: channel i of a head beside channel i + half."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """The checkpoint's tensors by GGUF name, as the converter stores them, in float32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = config["model_type"]
    names = gguf.get_tensor_name_map(ARCHITECTURES[kind], config["num_hidden_layers"])
    out = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        weight = tensor.astype(np.float32)
        stem, suffix = name.rsplit(".", 1)
        if kind in ("llama", "mistral") and stem.endswith("q_proj"):
            weight = permuted(weight, config["num_attention_heads"])
        if kind in ("llama", "mistral") and stem.endswith("k_proj"):
            weight = permuted(weight, config["num_key_value_heads"])
        if kind.startswith("gemma") and stem.endswith("norm"):
            weight = weight + np.float32(1)
        new = names.get_name(stem)
        assert new is not None, name
        out[f"{new}.{suffix}"] = weight
    return out


def facts_of(folder: Path) -> dict[str, Any]:
    """The metadata that the converter writes for the checkpoint's config, without the tokenizer; keys without the
    architecture's prefix start with a dot."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config["rope_parameters"]
    facts: dict[str, Any] = {
        ".block_count": config["num_hidden_layers"],
        ".context_length": config["max_position_embeddings"],
        ".embedding_length": config["hidden_size"],
        ".feed_forward_length": config["intermediate_size"],
        ".attention.head_count": heads,
        ".attention.head_count_kv": config["num_key_value_heads"],
        ".attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        ".attention.key_length": head_dim,
        ".attention.value_length": head_dim,
        ".rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
    }
    kind = config["model_type"]
    if kind in ("llama", "mistral", "phi3"):
        facts[".rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if kind in ("mistral", "phi3", "gemma2", "gemma3_text") and config.get("sliding_window"):
        facts[".attention.sliding_window"] = config["sliding_window"]
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(key):
            facts[f".{key}"] = float(config[key])
    return facts


def write_gguf(
    path: Path,
    folder: Path,
    *,
    facts: dict[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | Format | None] | None = None,
) -> Path:
    """Convert the checkpoint in `folder`. `facts` and `tensors` replace single entries; None takes one away. A tensor
    is numbers, or lines of a format as they are to be stored."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architecture = gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config["model_type"]]]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (facts_of(folder) | (facts or {})).items():
        name = architecture + key if key.startswith(".") else key
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int) and value < 0:
            writer.add_int64(name, value)
        elif isinstance(value, int):
            (writer.add_uint32 if value < 1 << 32 else writer.add_uint64)(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif value is not None:
            writer.add_array(name, value)
    add_tokenizer(writer)
    for name, tensor in {**tensors_of(folder), **(tensors or {})}.items():
        if isinstance(tensor, Format):
            writer.add_tensor(name, tensor.data, raw_dtype=gguf.GGMLQuantizationType[tensor.name])
        elif tensor is not None:
            writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """A byte-level vocabulary with one merge."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = sorted([chr(b) for b in printable] + [chr(256 + n) for n in range(256 - len(printable))])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*alphabet, "<|begin|>", "<|end|>", "<|turn|>", "ab"])
    writer.add_token_types([1] * 256 + [3] * 3 + [1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_eot_token_id(258)
    writer.add_add_bos_token(False)
