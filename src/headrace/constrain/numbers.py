"""What the library can keep of numbers: it holds bounds as float64 and `multipleOf` in 32 bits. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple, TypeGuard

MULTIPLE = 20_000
"""Largest `multipleOf`, without its decimal point, and largest product of all different ones: an automaton of so many
states may come of it. At 1,000,000 one takes ten seconds and 400 MB."""
DIGITS = 6
"""Most digits behind the point of a `multipleOf`."""

_LEAST, _MOST = -(2**63), 2**63 - 1
_EXACT = 2**53
_EDGE = 2**63 - 1024
"""Bounds of integers beyond it are brought in: the library counts in 64 bits, and holds no more of these numbers."""
_WORD = 2**32


class Multiple(NamedTuple):
    """coefficient / 10 ** digits"""

    coefficient: int
    digits: int

    @classmethod
    def of(cls, said: object) -> Multiple:
        """ValueError says what is wrong with it."""
        if not is_number(said) or said <= 0:
            raise ValueError("must be a number above 0")
        digits, scaled = 0, float(said)
        while scaled % 1 and digits <= DIGITS:  # as the library does it
            scaled, digits = scaled * 10, digits + 1
        if digits > DIGITS or Decimal(repr(said)) * 10**digits != Decimal(scaled):
            raise ValueError(f"is kept with {DIGITS} digits behind the point at most, and not every number is exact")
        coefficient = int(scaled)
        while digits and coefficient % 10 == 0:
            coefficient, digits = coefficient // 10, digits - 1
        if coefficient > MULTIPLE:
            raise ValueError(f"has the digits {str(coefficient)[:20]}, more than the {MULTIPLE} allowed")
        return cls(coefficient, digits)


def together(multiples: Sequence[tuple[Multiple, str]]) -> str | None:
    """The path of the first one that is too much beside those before it."""
    different: dict[Multiple, str] = {}
    for one, at in multiples:
        different.setdefault(one, at)
    product = 1
    known: list[Multiple] = []
    for one, at in different.items():
        product *= one.coefficient
        known.append(one)
        most = max(other.digits for other in known)
        scaled = [other.coefficient * 10 ** (most - other.digits) for other in known]
        in_words = len(known) == 1 or math.lcm(*scaled) * max(scaled) < _WORD  # the library multiplies in 32 bits
        if product > MULTIPLE or not in_words:
            return at
    return None


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)


def exact(value: int | float) -> bool:
    """Is a number of `enum` or `const` written as it is?"""
    return _is_finite(value) and int(float(value)) == int(value) and -_EDGE <= value <= _EDGE


def brought_in(schema: Mapping[str, Any]) -> dict[str, int]:
    """Bounds that lie too far out, and what stands for them. Without a type they may come to hold for integers, too."""
    edge = _EDGE if _is_whole(schema) else _EXACT
    low = {key: -edge for key in ("minimum", "exclusiveMinimum") if schema.get(key, 0) < -edge}
    return low | {key: edge for key in ("maximum", "exclusiveMaximum") if schema.get(key, 0) > edge}


def _is_whole(schema: Mapping[str, Any]) -> bool:
    types = schema.get("type", "number")
    return types == "integer" or (isinstance(types, list) and "integer" in types and "number" not in types)


def unkept(schema: Mapping[str, Any]) -> tuple[str, str] | None:
    """The keyword of a bound that would not be kept, and why. `exclusive` bounds beside others hold too."""
    whole = _is_whole(schema)
    low, high = -math.inf, math.inf
    for key, least in (("minimum", True), ("exclusiveMinimum", True), ("maximum", False), ("exclusiveMaximum", False)):
        if key not in schema:
            continue
        said = schema[key]
        open_ = key.startswith("exclusive")
        if not _holds(_kept(said, least, open_), said, least, open_) if whole else abs(said) > _EXACT:
            return key, f"{key} {said} is beyond what is kept exactly: 53 binary digits"
        low, high = (max(low, said), high) if least else (low, min(high, said))
    opens = schema.get("exclusiveMinimum") == low or schema.get("exclusiveMaximum") == high
    if low > high or (low == high and opens) or (whole and _no_whole(schema, low, high)):
        key = next(key for key in ("minimum", "exclusiveMinimum") if schema.get(key) == low)
        return key, f"no number lies between {low} and {high}"
    return None


def _holds(kept: float, said: float, least: bool, open_: bool) -> bool:
    """Does what keeps to one bound keep to the other?"""
    if kept == said:
        return not open_
    return kept > said if least else kept < said


def _no_whole(schema: Mapping[str, Any], low: float, high: float) -> bool:
    if math.isinf(low) or math.isinf(high):
        return False
    first, last = math.ceil(low), math.floor(high)
    first += first == schema.get("exclusiveMinimum")
    last -= last == schema.get("exclusiveMaximum")
    return first > last


def _kept(said: float, least: bool, open_: bool) -> int:
    """A bound of integers as the library holds it."""
    value = float(said)
    if open_:
        value += 0 if value % 1 else 1.0 if least else -1.0
    return max(_LEAST, min(_MOST, math.ceil(value) if least else math.floor(value)))


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(float(value))  # an integer may be beyond all floats
    except OverflowError:
        return False
