"""Tiny random checkpoints of every family, as transformers saves them, with a small tokenizer: `LLM(path)` works."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB = 300
"""Width of the logits: more than the tokenizer knows, as in many real models."""
BOS, EOS, TURN = 256, 257, 258

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
GEMMA: dict[str, Any] = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 48, "tie_word_embeddings": True}
FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {"rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0}}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 40, "head_dim": 24}),
    "qwen2": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32, "attention_bias": True}),
    "gemma2": (
        transformers.Gemma2Config,
        {**GEMMA, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 40.0},
    ),
    "gemma3_text": (transformers.Gemma3TextConfig, {**GEMMA, "num_hidden_layers": 7, "num_key_value_heads": 1}),
    "phi3": (
        transformers.Phi3Config,
        {
            "sliding_window": 100,
            "partial_rotary_factor": 0.75,
            "hidden_size": 96,
            "original_max_position_embeddings": 512,
        },
    ),
}
"""Config class and what differs from `COMMON`."""

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|turn|>' + m['role'] + '\n' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)


def tiny_checkpoint(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    shard_bytes: int | None = None,
    **overrides: Any,
) -> Path:
    """Save a random model of `family` (a model_type) below `folder` and return its own folder.

    `overrides` go into the config; `shard_bytes` cuts the weights into files of about that size.
    """
    kind, own = FAMILIES[family]
    config = kind(**{**COMMON, **own, **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomize(model, seed)
    path = folder / f"tiny-{family}"
    size = {} if shard_bytes is None else {"max_shard_size": shard_bytes}
    model.to(getattr(torch, dtype)).save_pretrained(path, **size)
    save_tokenizer(path)
    return path


@torch.no_grad()
def randomize(model: Any, seed: int) -> None:
    """Weights large enough that every part of the model moves the logits: norms off 1, biases off 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if "norm" in name:
            weight.copy_(weight + 0.3 * noise)
        elif weight.ndim == 1:
            weight.copy_(0.5 * noise)
        elif "embed" in name:
            weight.copy_(noise)
        else:
            weight.copy_(1.3 * noise * weight.shape[1] ** -0.5)


def save_tokenizer(path: Path) -> None:
    """A byte-level tokenizer without merges: one token per byte, and three specials."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|begin|>", "<|end|>", "<|turn|>")])
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
