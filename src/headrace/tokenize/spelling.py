"""How tokens of a vocabulary are spelled: the bytes that each stands for. Pure functions of one token's text."""

from __future__ import annotations

import re


def _alphabet() -> dict[int, int]:
    """Code point to byte, GPT-2's reversible alphabet: printable Latin-1 stands for itself, the other 68 bytes are
    moved to U+0100 and up, in order (Radford et al. 2019, encoder.py's `bytes_to_unicode`)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in set(shown)]
    return {b: b for b in shown} | {0x100 + i: b for i, b in enumerate(moved)}


_BYTES = _alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level(token: str) -> bytes:
    """Each character of the alphabet is one byte; a token with any other character stands for its own text."""
    try:
        return bytes([_BYTES[ord(c)] for c in token])
    except KeyError:
        return token.encode("utf-8", "replace")


def sentencepiece(token: str) -> bytes:
    """`▁` is a space, `<0x0A>` the one byte; everything else stands for itself."""
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace("\u2581", " ").encode("utf-8", "replace")
