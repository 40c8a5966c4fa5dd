"""The file of API keys: what a key is, and how a file of them is read. Pure functions of its bytes.

A key is kept as its SHA-256 only.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import shown
from headrace.serve.options import KEY_CHARACTERS, is_key

FILE_BYTES = 2**20
"""Largest file of keys."""
LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent")
MOST = 10**12
"""Largest limit: a bucket counts exactly."""
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


class KeyFileError(Exception):
    """A file of keys that cannot be used; names the file, and the line where that is known."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key and what its holder may do. None: no limit."""

    name: str
    """What logs and metrics call it."""
    digest: bytes = field(repr=False)
    """SHA-256 of the key."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    """Requests at once."""


def digest_of(key: str) -> bytes:
    """How a key is kept and compared."""
    return hashlib.sha256(key.encode()).digest()


def parsed(raw: bytes, file: Path) -> list[Key]:
    """The keys of a file:

    [keys.NAME]
    key = "..."                # or sha256 = "64 hexadecimal digits"
    requests_per_minute = 60   # these three may be left out
    tokens_per_minute = 100000
    concurrent = 4

    KeyFileError names the line at fault.
    """
    if len(raw) > FILE_BYTES:
        raise KeyFileError(f"{file}: is larger than {FILE_BYTES} bytes")
    try:
        text = raw.decode()
        told = tomllib.loads(text)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise KeyFileError(f"{file}, line {line}: is not UTF-8") from None
    except RecursionError:
        raise KeyFileError(f"{file}: is nested too deeply") from None
    except tomllib.TOMLDecodeError as error:
        message, _, place = str(error).removesuffix(")").rpartition(" (at ")
        at = re.match(r"line \d+", place)  # else it is the end of the document
        raise KeyFileError(f"{file}, {at[0] if at else f'line {_last_line(text)}'}: is not TOML: {message}") from None
    except ValueError as error:
        raise KeyFileError(f"{file}: is not TOML: {error}") from None  # a number of thousands of digits
    tables = told.pop("keys", {})
    if told or not isinstance(tables, dict):
        name = next(iter(told), "keys")
        raise KeyFileError(f"{file}, line {_line(text, name)}: only tables [keys.NAME] can stand here, not {name!r}")
    if not tables:
        raise KeyFileError(f"{file}: holds no keys; one is two lines, [keys.alice] and key = '...'")
    keys: dict[bytes, Key] = {}
    for name, table in tables.items():
        try:
            key = _key(name, table)
            if (other := keys.setdefault(key.digest, key)) is not key:
                raise _FieldError(None, f"has the same key as keys.{other.name}")
        except _FieldError as error:
            raise KeyFileError(f"{file}, line {_line(text, name, error.field)}: keys.{name} {error}") from None
    return list(keys.values())


class _FieldError(Exception):
    """One key's field that cannot stand; never holds what stands there, which may be a secret."""

    def __init__(self, field: str | None, message: str) -> None:
        super().__init__(message)
        self.field = field


def _key(name: str, table: Any) -> Key:
    if not _NAME.fullmatch(name):
        raise _FieldError(None, "is no name: letters, digits, _ - and . are allowed, 64 at most")
    if not isinstance(table, dict):
        raise _FieldError(None, "must be a table, [keys.NAME]")
    for field_name in table:
        if field_name not in ("key", "sha256", *LIMITS):
            known = ", ".join(("key", "sha256", *LIMITS))
            raise _FieldError(field_name, f"has the unknown field {field_name!r}; known are {known}")
    limits = {limit: table[limit] for limit in LIMITS if limit in table}
    for limit, value in limits.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST:
            rule = f"a whole number from 1 to {MOST:,}"
            raise _FieldError(limit, f"has {limit} = {shown(value)}, which must be {rule}")
    return Key(name, _digest(table), **limits)


def _digest(table: Mapping[str, Any]) -> bytes:
    if ("key" in table) == ("sha256" in table):
        raise _FieldError(None, "needs one of key and sha256")
    if "key" in table:
        if not isinstance(table["key"], str) or not is_key(table["key"]):
            rule = f"{KEY_CHARACTERS} to 512 printable ASCII characters without spaces"
            raise _FieldError("key", f"has a key that cannot be one: {rule}")
        return digest_of(table["key"])
    if not isinstance(table["sha256"], str) or not _DIGEST.fullmatch(table["sha256"]):
        raise _FieldError("sha256", "has a sha256 that is none: 64 hexadecimal digits")
    return bytes.fromhex(table["sha256"])


def _line(text: str, name: str, field_name: str | None = None) -> int:
    """The line where a table begins, or of a field in it; as people write TOML."""
    lines = text.split("\n")
    head = re.compile(rf"\s*(\[\s*keys\s*\.\s*[\"']?{re.escape(name)}[\"']?\s*\]|\[?[\"']?{re.escape(name)}\b)")
    begin = next((i for i, line in enumerate(lines) if head.match(line)), 0)
    if field_name is None:
        return begin + 1
    inside = re.compile(rf"\s*[\"']?{re.escape(field_name)}[\"']?\s*=")
    return next((i for i, line in enumerate(lines[begin:], begin) if inside.match(line)), begin) + 1


def _last_line(text: str) -> int:
    return text.rstrip().count("\n") + 1
