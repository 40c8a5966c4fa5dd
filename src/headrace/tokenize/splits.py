"""How byte-level vocabularies cut text into words before merging: one recipe per name that `tokenizer.ggml.pre` may
have. The expressions are those of the models' own tokenizer.json files; the names are llama.cpp's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"

_QWEN2 = rf"{_CONTRACTION}|{_LEAD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_LLAMA3 = rf"{_CONTRACTION}|{_LEAD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_GPT4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)


@dataclass(frozen=True, slots=True)
class Split:
    """One way of cutting, and what goes with it in the models that use it."""

    cut: Callable[[], pre_tokenizers.PreTokenizer]
    whole_words: bool = False
    """A word that is a token is taken whole, without merging (Llama 3's `ignore_merges`)."""
    adds_bos: bool = False
    """Where the file does not say."""


def _expression(expression: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    return lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(expression), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_gpt2() -> pre_tokenizers.PreTokenizer:
    """Each digit alone, then as GPT-2: white space before a digit stays together."""
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), _gpt2()])


def _deepseek_coder() -> pre_tokenizers.PreTokenizer:
    cuts = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(cut), "isolated") for cut in cuts),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


SPLITS: dict[str, Split] = {
    **dict.fromkeys(("default", "gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais"), Split(_gpt2)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), Split(_digits_gpt2)
    ),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez"), Split(_expression(_QWEN2))),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"),
        Split(_expression(_LLAMA3), whole_words=True, adds_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Split(_expression(_LLAMA3))),
    "tekken": Split(_expression(_TEKKEN), whole_words=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), Split(_expression(_GPT4O))),
    "deepseek-coder": Split(_deepseek_coder),
}
"""By the value of `tokenizer.ggml.pre`. A file without one is cut as `default`."""
