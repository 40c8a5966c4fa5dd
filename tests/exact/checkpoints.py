"""Tiny random models of every number format, for the native backend: heads of multiples of 16 channels."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.gguf_files import tensors_of, write_gguf
from tests.models.tiny import tiny_checkpoint
from tests.native.weights import like_a_model

LONG: dict[str, Any] = {"max_position_embeddings": 1300}
SUPER = ("Q4_K", "Q6_K", "Q5_K", "Q3_K", "Q2_K", "IQ4_XS")
PLAIN = ("Q5_0", "Q8_0", "Q4_1", "Q4_0", "Q5_1", "IQ4_NL")


def _quantized(folder: Path, family: str, formats: tuple[str, ...], **config: Any) -> Path:
    """A GGUF file whose matrices take the formats in turn, so that one layer mixes them."""
    source = tiny_checkpoint(folder, family, **LONG, **config)
    rng, names = np.random.default_rng(5), cycle(formats)
    tensors = {}
    for name, tensor in tensors_of(source).items():
        if tensor.ndim == 2:
            spread = 1.0 if "embd" in name else 1.3 * tensor.shape[1] ** -0.5
            outputs, inputs = tensor.shape
            tensors[name] = like_a_model(next(names), outputs, inputs, spread, rng)
    return write_gguf(folder / f"{family}.gguf", source, tensors=tensors)


def k_quants(folder: Path) -> Path:
    return _quantized(folder, "llama", SUPER, hidden_size=256, intermediate_size=512, num_hidden_layers=2)


def blocks_of_32(folder: Path) -> Path:
    """With biases, and one key head to two heads of 16 channels; 96 inputs fill no pair of groups."""
    return _quantized(folder, "qwen2", PLAIN)


def bf16_windows(folder: Path) -> Path:
    """Windows of 48 in five of seven layers, norms on heads, one key head."""
    return tiny_checkpoint(folder, "gemma3_text", dtype="bfloat16", **LONG)


def f16_caps(folder: Path) -> Path:
    """Capped scores and logits."""
    return tiny_checkpoint(folder, "gemma2", dtype="float16", **LONG)


def f32_partial(folder: Path) -> Path:
    """Rotation of a part of the channels, one matrix for queries, keys and values."""
    return tiny_checkpoint(folder, "phi3", hidden_size=64, num_attention_heads=4, max_position_embeddings=512)


MAKERS: dict[str, Callable[[Path], Path]] = {
    make.__name__: make for make in (k_quants, blocks_of_32, bf16_windows, f16_caps, f32_partial)
}
