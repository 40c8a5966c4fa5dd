"""Typed reading of a config whose every value may be missing, null or nonsense. Knows no family."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

LARGEST = 3e38
"""Of numbers: about what float32 holds, in which they are used."""

MOST = (1 << 63) - 1
"""Of counts and sizes."""


class ConfigFacts:
    """A config in Hugging Face's words, or other keys and values. null counts as missing; a value that is missing, of a
    wrong type or out of range is a ValueError that names the key."""

    def __init__(self, config: Mapping[str, Any], *, within: str = "", called: str = "the config") -> None:
        """`within` is put before keys in errors, `called` is what errors say holds the keys."""
        self._config = config
        self._within = f"{within}." if within else ""
        self._called = called

    def _get(self, key: str, default: Any, what: str) -> Any:
        value = self._config.get(key)
        if value is not None:
            return value
        if default is None:
            raise ValueError(f"{self._called} has no {self._within}{key}: must be {what}")
        return default

    def _refuse(self, key: str, value: Any, what: str) -> ValueError:
        return ValueError(f"{self._called}'s {self._within}{key} is {reprlib.repr(value)}: must be {what}")

    def has(self, key: str) -> bool:
        return self._config.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self._get(key, default, "a whole number of at least 1")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._refuse(key, value, "a whole number of at least 1")
        if value > MOST:
            raise self._refuse(key, value, f"at most {MOST}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number that float32 can hold."""
        value = self._get(key, default, "a number")
        if not _is_number(value):
            raise self._refuse(key, value, "a finite number")
        return float(value)

    def factor(self, key: str, default: float | None = None) -> float:
        """A number above 0, and not so small that float32 would lose it."""
        value = self.number(key, default)
        if value < 1 / LARGEST:
            raise self._refuse(key, value, "above 0, also in float32")
        return value

    def cap(self, key: str, default: float | None) -> float | None:
        """A number above 0; None where the config says null, `default` where it does not have the key."""
        if key in self._config and self._config[key] is None:
            return None
        return self.factor(key) if self.has(key) else default

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._get(key, default, "true or false")
        if not isinstance(value, bool):
            raise self._refuse(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default, "a string")
        if not isinstance(value, str):
            raise self._refuse(key, value, "a string")
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self._get(key, None, "a list of numbers")
        if not isinstance(value, list | tuple) or not all(_is_number(v) for v in value):
            raise self._refuse(key, value, "a list of finite numbers")
        return tuple(float(v) for v in value)

    def texts(self, key: str, count: int) -> tuple[str, ...] | None:
        """`count` strings, or None where there are none."""
        value = self._config.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or len(value) != count or not all(isinstance(v, str) for v in value):
            raise self._refuse(key, value, f"a list of {count} strings")
        return tuple(value)

    def mapping(self, key: str) -> Mapping[str, Any] | None:
        value = self._config.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self._refuse(key, value, "an object")
        return value


def _is_number(value: Any) -> bool:
    """Compared before it is made a float, which an integer of hundreds of digits cannot be."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
