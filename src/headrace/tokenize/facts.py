"""What a tokenizer's files say besides how text is cut: named tokens, what is put around a text, templates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Facts:
    """Read once, from GGUF metadata or from a folder in the Hugging Face layout."""

    size: int
    """Ids from 0 to below this one are known."""
    spell: Callable[[str], bytes]
    """The bytes that a token of the vocabulary stands for."""
    bos: int | None = None
    eos: frozenset[int] = frozenset()
    """End of sequence, of turn, of message."""
    pad: int | None = None
    prefix: tuple[int, ...] = ()
    """What the files put before a text: the BOS or nothing, in most."""
    suffix: tuple[int, ...] = ()
    """What the files put after a text."""
    drops_space: bool = False
    """One space at the start of a decoded text is the tokenizer's own and is taken off."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Texts of the named tokens, as templates know them: bos_token, eos_token, unk_token, pad_token."""
    templates: Mapping[str, str] = field(default_factory=dict)
    """Chat templates by name: `default`, sometimes `tool_use`."""
    fim: tuple[int, int, int] | None = None
    """Fill-in-the-middle tokens: prefix, suffix, middle."""
