"""A tokenizer from GGUF metadata: `tokenizer.ggml.*` and `tokenizer.chat_template*`, as llama.cpp writes them.

Takes the metadata as plain values (arrays may be lists, NumPy arrays or any other sequence); knows no file.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, models, normalizers

from headrace.errors import ModelFileError
from headrace.tokenize import spelling
from headrace.tokenize.facts import Facts
from headrace.tokenize.kept import kept_pairs
from headrace.tokenize.sentencepiece import derive_merges
from headrace.tokenize.splits import SPLITS

_DERIVATION = "1"
"""Changes whenever `derive_merges` would give something else for the same vocabulary."""

_KEY = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER = 1, 2, 3, 4
"""Token types: part of text; the unknown token; control; matched whole in text, but part of it."""

_ENDS = ("bos", "eos", "eot", "eom")
_WORDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_FIM_TEXTS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
)


def read_gguf(metadata: Mapping[str, Any], *, cache_dir: Path, path: object) -> tuple[tokenizers.Tokenizer, Facts]:
    """The tokenizer and what the metadata say about it.

    ModelFileError, naming `path` and the key, where something is missing, contradicts itself or is not known here.
    """
    read = _Reader(metadata, path)
    vocabulary = _vocabulary(read)
    match read.text("model"):
        case "gpt2":
            return _byte_level(read, vocabulary)
        case "llama":
            return _sentencepiece(read, vocabulary, cache_dir)
        case other:
            raise read.error("model", f"is {other!r}; gpt2 (byte-level BPE) and llama (SentencePiece) can be read")


@dataclass(frozen=True)
class _Reader:
    """Checked access to the metadata."""

    metadata: Mapping[str, Any]
    path: object

    def error(self, key: str, message: str) -> ModelFileError:
        return ModelFileError(self.path, f"{_KEY}{key} {message}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.metadata.get(_KEY + key, default)
        if not isinstance(value, str):
            raise self.error(key, "is missing" if value is None else f"must be a string, not {type(value).__name__}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(_KEY + key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {value!r}")
        return value

    def strings(self, key: str) -> list[str] | None:
        """None where the key is missing."""
        value = self.metadata.get(_KEY + key)
        if value is None:
            return None
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self.error(key, "must be an array of strings")
        out = list(value)
        if not all(isinstance(item, str) for item in out):
            raise self.error(key, "must hold nothing but strings")
        return out

    def numbers(self, key: str, count: int) -> np.ndarray | None:
        """[count]; None where the key is missing."""
        value = self.metadata.get(_KEY + key)
        if value is None:
            return None
        numbers = np.asarray(value)
        if numbers.dtype.kind not in "iuf" or numbers.shape != (count,):
            raise self.error(key, f"must be an array of {count} numbers, one per token")
        return numbers

    def id(self, key: str, count: int) -> int | None:
        """A token id; None where the key is missing."""
        value = self.metadata.get(_KEY + key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
            raise self.error(key, f"must be a token id below {count}, not {value!r}")
        return value


@dataclass(frozen=True)
class _Vocabulary:
    """The tokens and their types."""

    tokens: list[str]
    types: np.ndarray | None
    """[tokens] integers; None where the file has none."""
    named: Mapping[str, int]
    """bos, eos, eot, eom, unknown, padding: as many as the file names."""

    def of_type(self, *types: int) -> set[int]:
        """Ids of the tokens of these types."""
        return set() if self.types is None else set(np.flatnonzero(np.isin(self.types, types)).tolist())

    def added(self) -> list[AddedToken]:
        """Tokens that are matched whole in a text. Special are control tokens, the unknown one and those that begin or
        end a sequence; a padding token that is part of ordinary text is not."""
        special = self.of_type(_CONTROL, _UNKNOWN) | {self.named[name] for name in _ENDS if name in self.named}
        special |= {i for i in self.named.values() if self.types is None or self.types[i] != _NORMAL}
        user = self.of_type(_USER) - special
        return [
            AddedToken(self.tokens[i], special=is_special, normalized=False)
            for ids, is_special in ((special, True), (user, False))
            for i in sorted(ids)
            if self.tokens[i]
        ]


def _vocabulary(read: _Reader) -> _Vocabulary:
    tokens = read.strings("tokens")
    if not tokens:
        raise read.error("tokens", "is missing" if tokens is None else "is empty")
    types = read.numbers("token_type", len(tokens))
    found = {name: read.id(f"{name}_token_id", len(tokens)) for name in (*_ENDS, "unknown", "padding")}
    return _Vocabulary(
        tokens,
        types,
        {name: i for name, i in found.items() if i is not None},
    )


def _byte_level(read: _Reader, vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, Facts]:
    """Byte-level BPE, as GPT-2 brought it up."""
    name = read.text("pre", "default")
    split = SPLITS.get(name)
    if split is None:
        raise read.error("pre", f"is {name!r}, a pre-tokenizer not known here; known are: {', '.join(sorted(SPLITS))}")
    engine = _engine(read, vocabulary.tokens, _merges(read) or [], ignore_merges=split.whole_words)
    engine.pre_tokenizer = split.cut()
    engine.add_tokens(vocabulary.added())
    return engine, _facts(
        read, vocabulary, engine, spell=spelling.byte_level, adds_bos=split.adds_bos, drops_space=False
    )


def _sentencepiece(read: _Reader, vocabulary: _Vocabulary, cache_dir: Path) -> tuple[tokenizers.Tokenizer, Facts]:
    """SentencePiece's BPE over characters, bytes as a fallback; its scores become an order of merges.

    A space becomes `▁`. Where the file says so (or nothing), each stretch of text gets one more in front, after control
    tokens too, as SentencePiece, llama.cpp and the tokenizer.json files of Llama 2 and Phi-3 have it.
    """
    # Gemma's files spell runs of spaces as such, though the text they must match has `▁` by then
    gemma = str(read.metadata.get("general.architecture", "")).startswith("gemma")
    tokens = [_underlined(token) for token in vocabulary.tokens] if gemma else vocabulary.tokens
    with _no_collections():
        engine = _engine(
            read,
            tokens,
            _merges(read) or _derived(read, vocabulary, tokens, cache_dir, by_place=gemma),
            fuse_unk=True,
            byte_fallback=True,
            unk_token=tokens[vocabulary.named["unknown"]] if "unknown" in vocabulary.named else None,
        )
    prefixed = read.flag("add_space_prefix", True)
    replace = normalizers.Replace(" ", "\u2581")
    engine.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace]) if prefixed else replace
    engine.add_tokens([token for token in vocabulary.added() if engine.token_to_id(token.content) is not None])
    return engine, _facts(read, vocabulary, engine, spell=spelling.sentencepiece, adds_bos=True, drops_space=prefixed)


def _underlined(token: str) -> str:
    return "\u2581" * len(token) if " " in token and not token.strip() else token


def _merges(read: _Reader) -> list[tuple[str, str]] | None:
    """The file's own merges; None where it has none."""
    merges = read.strings("merges")
    if merges is None:
        return None
    pairs = [tuple(merge.split(" ")) for merge in merges]
    for i, pair in enumerate(pairs):
        if len(pair) != 2:
            raise read.error("merges", f"must hold two tokens with one space between them; number {i} is {merges[i]!r}")
    return pairs  # type: ignore[return-value]


def _derived(
    read: _Reader, vocabulary: _Vocabulary, tokens: list[str], cache_dir: Path, *, by_place: bool
) -> list[tuple[str, str]]:
    """Merges from scores, or, in Gemma's files, whose scores do not follow the order of its merges, from the tokens'
    places in the vocabulary. Deriving takes seconds for a large vocabulary, so they are kept in `cache_dir`."""
    count = len(tokens)
    scores = -np.arange(count, dtype=np.float64) if by_place else read.numbers("scores", count)
    if scores is None:
        raise read.error("scores", "is missing, and so is tokenizer.ggml.merges: one of them must be there")
    barred = sorted(vocabulary.of_type(_CONTROL))
    digest = hashlib.sha256(f"{_DERIVATION} {count} ".encode())
    for described in (
        np.array([len(token) for token in tokens], np.int32),
        scores.astype(np.float64),
        np.array(barred, np.int32),
    ):
        digest.update(described.tobytes())
    digest.update("".join(tokens).encode())
    pairs = kept_pairs(cache_dir, digest.hexdigest(), lambda: derive_merges(tokens, scores.tolist(), barred))
    if pairs.size and not 0 <= pairs.min() <= pairs.max() < count:
        pairs = derive_merges(tokens, scores.tolist(), barred)
    if len(pairs) < 2:
        return [(tokens[left], tokens[right]) for left, right in pairs.tolist()]
    left, right = pairs.T.tolist()
    return list(zip(itemgetter(*left)(tokens), itemgetter(*right)(tokens), strict=True))


def _engine(read: _Reader, tokens: list[str], merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges, **options))
    except Exception as error:  # the library raises bare Exceptions
        raise read.error("merges", f"do not fit the vocabulary: {error}") from None


@contextmanager
def _no_collections() -> Iterator[None]:
    """Hundreds of thousands of tuples are about to be made, none of them garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _facts(
    read: _Reader,
    vocabulary: _Vocabulary,
    engine: tokenizers.Tokenizer,
    *,
    spell: Callable[[str], bytes],
    adds_bos: bool,
    drops_space: bool,
) -> Facts:
    tokens, named = vocabulary.tokens, vocabulary.named
    bos, eos = named.get("bos"), named.get("eos")
    add_bos, add_eos = read.flag("add_bos_token", adds_bos), read.flag("add_eos_token", False)
    return Facts(
        size=len(tokens),
        spell=spell,
        bos=bos,
        eos=frozenset(named[name] for name in ("eos", "eot", "eom") if name in named),
        pad=named.get("padding"),
        prefix=(bos,) if bos is not None and add_bos else (),
        suffix=(eos,) if eos is not None and add_eos else (),
        drops_space=drops_space,
        words={word: tokens[named[name]] for word, name in _WORDS.items() if name in named},
        templates=_templates(read),
        fim=_fim(read, engine, len(tokens)),
    )


def _templates(read: _Reader) -> dict[str, str]:
    """`tokenizer.chat_template` is the default one, `tokenizer.chat_template.NAME` are others."""
    key = "tokenizer.chat_template"
    found = {name: text for name, text in read.metadata.items() if name == key or name.startswith(f"{key}.")}
    for name, text in found.items():
        if not isinstance(text, str):
            raise ModelFileError(read.path, f"{name} must be a string, not {type(text).__name__}")
    return {name[len(key) + 1 :] or "default": text for name, text in found.items()}


def _fim(read: _Reader, engine: tokenizers.Tokenizer, count: int) -> tuple[int, int, int] | None:
    """By the file's keys (also the older ones), else by the names that models use for these control tokens."""
    for keys in (("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")):
        prefix, suffix, middle = (read.id(f"{key}_token_id", count) for key in keys)
        if prefix is not None and suffix is not None and middle is not None:
            return prefix, suffix, middle
    return named_fim(engine)


def named_fim(engine: tokenizers.Tokenizer) -> tuple[int, int, int] | None:
    """Fill-in-the-middle tokens (prefix, suffix, middle), by the names that models use for them."""
    for names in _FIM_TEXTS:
        prefix, suffix, middle = (engine.token_to_id(name) for name in names)
        if prefix is not None and suffix is not None and middle is not None:
            return prefix, suffix, middle
    return None
