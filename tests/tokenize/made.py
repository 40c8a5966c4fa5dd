"""Small tokenizers as GGUF metadata: every byte, some words, some control tokens. No model has them."""

from __future__ import annotations

from typing import Any

from headrace.tokenize.spelling import _BYTES

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SPELLED = {byte: chr(code) for code, byte in _BYTES.items()}


def spelled(text: str) -> str:
    """In the byte-level alphabet."""
    return "".join(_SPELLED[byte] for byte in text.encode())


def byte_level(words: tuple[str, ...] = (), controls: tuple[str, ...] = (), **keys: Any) -> dict[str, Any]:
    """Ids 0 to 255 are the bytes, then the words (each merged from its beginning and its last byte), then controls."""
    tokens = [_SPELLED[byte] for byte in range(256)]
    merges = []
    for word in words:
        text = spelled(word)
        for end in range(2, len(text) + 1):
            if text[:end] not in tokens:
                tokens.append(text[:end])
                merges.append(f"{text[: end - 1]} {text[end - 1]}")
    types = [1] * len(tokens) + [3] * len(controls)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, *controls],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        **{"tokenizer." + key.replace("__", "."): value for key, value in keys.items()},
    }


def pieces(words: tuple[str, ...] = (), controls: tuple[str, ...] = (), **keys: Any) -> dict[str, Any]:
    """SentencePiece: <unk>, <s>, </s>, controls, the bytes, words, then their characters."""
    heads = ["<unk>", "<s>", "</s>", *controls]
    chars = sorted(set("".join(words)))
    tokens = [*heads, *(f"<0x{byte:02X}>" for byte in range(256)), *(w for w in words if len(w) > 1), *chars]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0 if i < len(heads) + 256 else -float(i) for i in range(len(tokens))],
        "tokenizer.ggml.token_type": [2, *[3] * (len(heads) - 1), *[6] * 256, *[1] * (len(tokens) - len(heads) - 256)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{"tokenizer." + key.replace("__", "."): value for key, value in keys.items()},
    }
