"""Rotary position embedding (RoFormer, Su et al. 2021) and the ways to stretch it: data, and the frequencies it gives.

Frequencies are fixed once, from the context the engine is configured for, and never change with a request's length: a
cached key stays valid. They are computed exactly from a float32 exponent and rounded once, which gives the float32
numbers of the models' own code (now and then one unit in the last place beside them).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal, localcontext

import numpy as np

from headrace.models.facts import ConfigFacts


@dataclass(frozen=True, slots=True)
class Linear:
    """Position interpolation (Chen et al. 2023): every frequency divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Dynamic:
    """NTK-aware scaling of the base by how far the configured context is above `trained`."""

    factor: float
    trained: int


@dataclass(frozen=True, slots=True)
class Llama3:
    """Llama 3.1: slow frequencies divided by `factor`, fast ones kept, a smooth passage between."""

    factor: float
    low: float
    high: float
    trained: int


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN (Peng et al. 2023): a ramp between interpolated and kept frequencies, and a factor on the rotation."""

    factor: float
    trained: int
    attention: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class LongRope:
    """LongRoPE (Ding et al. 2024): a divisor per frequency; `long` where the context is above `trained`."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    trained: int
    attention: float


Scaling = Linear | Dynamic | Llama3 | Yarn | LongRope


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation of the first `dim` channels of a head, channel i with channel i + dim / 2."""

    theta: float
    dim: int
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise ValueError(f"rotary embedding over {self.dim} channels: must be even and at least 2")
        if not self.theta > 1:
            raise ValueError(f"rope_theta is {self.theta}: must be above 1")
        if isinstance(self.scaling, Dynamic) and self.dim < 4:
            raise ValueError(f"dynamic scaling over {self.dim} channels: must be at least 4")
        if isinstance(self.scaling, LongRope):
            for name, divisors in (("short_factor", self.scaling.short), ("long_factor", self.scaling.long)):
                if len(divisors) != self.dim // 2:
                    raise ValueError(f"{name} has {len(divisors)} numbers: must be {self.dim // 2}, one per frequency")
                if not all(d > 0 and math.isfinite(d) for d in divisors):
                    raise ValueError(f"{name} holds a number that is not above 0")


def frequencies(rope: Rope, context: int) -> tuple[np.ndarray, float]:
    """(float32 [dim / 2] radians per token, factor on sine and cosine), for a context of so many tokens.

    ValueError where numbers that are each possible give frequencies that are not.
    """
    with np.errstate(all="ignore"):
        table, factor = _frequencies(rope, context)
    if not np.isfinite(table).all():
        raise ValueError(f"rope_theta {rope.theta} and its scaling give rotary frequencies that are not finite")
    return table, factor


def _frequencies(rope: Rope, context: int) -> tuple[np.ndarray, float]:
    match rope.scaling:
        case None:
            return _plain(rope.theta, rope.dim), 1.0
        case Linear(factor):
            return _plain(rope.theta, rope.dim) / np.float32(factor), 1.0
        case Dynamic(factor, trained):
            grown = factor * max(context, trained) / trained - (factor - 1)
            return _plain(rope.theta * grown ** (rope.dim / (rope.dim - 2)), rope.dim), 1.0
        case Llama3() as scaling:
            return _llama3(_plain(rope.theta, rope.dim), scaling), 1.0
        case Yarn() as scaling:
            return _yarn(rope, scaling), scaling.attention
        case LongRope(short, long, trained, attention):
            divisors = np.asarray(long if context > trained else short, np.float32)
            return np.float32(1) / (divisors * _periods(rope.theta, rope.dim)), attention


def parse(facts: ConfigFacts, head_dim: int, *, theta: float, layer_type: str | None = None) -> Rope:
    """What a config says about rotation: `rope_parameters` (transformers 5) or `rope_scaling` and keys beside it.

    `theta` is the family's base where the config names none; `layer_type` picks a part of a nested `rope_parameters`.
    Raises ValueError for a rope_type that is not known and for numbers that are missing or make no sense.
    """
    given = facts.mapping("rope_scaling") or facts.mapping("rope_parameters") or {}
    if layer_type is not None and layer_type in given:
        given = ConfigFacts(given, within="rope_parameters").mapping(layer_type) or {}
    own = ConfigFacts(given, within="rope_parameters")
    partial = own.factor("partial_rotary_factor", facts.factor("partial_rotary_factor", 1.0))
    if partial > 1:
        raise ValueError(f"partial_rotary_factor is {partial}: must be at most 1")
    return Rope(
        theta=own.number("rope_theta", facts.number("rope_theta", theta)),
        dim=int(round(head_dim * partial, 6)),
        scaling=_scaling(facts, own),
    )


def _scaling(facts: ConfigFacts, own: ConfigFacts) -> Scaling | None:
    kind = own.text("rope_type", own.text("type", "default"))
    made_for = facts.integer("max_position_embeddings")
    trained = own.integer("original_max_position_embeddings", made_for)
    trained = facts.integer("original_max_position_embeddings", trained)
    match kind:
        case "default":
            return None
        case "linear":
            return Linear(own.factor("factor"))
        case "dynamic":
            return Dynamic(own.factor("factor"), made_for)
        case "llama3":
            low, high = own.number("low_freq_factor"), own.number("high_freq_factor")
            if not 0 < low < high:
                raise ValueError(f"low_freq_factor {low} and high_freq_factor {high}: must be above 0 and ascend")
            return Llama3(own.factor("factor"), low, high, trained)
        case "yarn":
            return _parse_yarn(own, own.factor("factor", made_for / trained), trained)
        case "longrope" | "su":
            if trained < 2:
                raise ValueError(f"original_max_position_embeddings is {trained}: must be at least 2 for longrope")
            factor = own.factor("factor", made_for / trained)
            stretch = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
            return LongRope(
                short=own.numbers("short_factor"),
                long=own.numbers("long_factor"),
                trained=trained,
                attention=own.factor("attention_factor", stretch),
            )
    raise ValueError(f"rope_type {kind!r} is not supported: known are default, linear, dynamic, llama3, yarn, longrope")


def _parse_yarn(own: ConfigFacts, factor: float, trained: int) -> Yarn:
    def stretch(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0

    above, below = own.number("mscale", 0.0), own.number("mscale_all_dim", 0.0)
    if above < 0 or below < 0:
        raise ValueError(f"mscale {above} and mscale_all_dim {below}: must be 0 or above")
    return Yarn(
        factor=factor,
        trained=trained,
        attention=own.factor("attention_factor", stretch(above) / stretch(below) if above and below else stretch(1.0)),
        beta_fast=own.factor("beta_fast", 32.0),
        beta_slow=own.factor("beta_slow", 1.0),
        truncate=own.flag("truncate", default=True),
    )


def _periods(theta: float, dim: int) -> np.ndarray:
    """float32 [dim / 2]: theta ^ (2 i / dim). In decimals, because the last digit of a power of the C library or of
    NumPy may differ from one processor to another."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    with localcontext(prec=30):
        return np.array([float(Decimal(theta) ** Decimal(float(e))) for e in exponents], np.float32)


def _plain(theta: float, dim: int) -> np.ndarray:
    return np.float32(1) / _periods(theta, dim)


def _llama3(plain: np.ndarray, scaling: Llama3) -> np.ndarray:
    factor, low, high = np.float32(scaling.factor), np.float32(scaling.low), np.float32(scaling.high)
    trained = np.float32(scaling.trained)
    wavelength = np.float32(2 * math.pi) / plain
    slow = wavelength > scaling.trained / scaling.low
    fast = wavelength < scaling.trained / scaling.high
    smooth = (trained / wavelength - low) / (high - low)
    between = (np.float32(1) - smooth) * plain / factor + smooth * plain
    return np.where(slow, plain / factor, np.where(fast, plain, between)).astype(np.float32)


def _yarn(rope: Rope, scaling: Yarn) -> np.ndarray:
    def turning(rotations: float) -> float:
        """The channel pair that makes so many rotations over the trained context."""
        return rope.dim * math.log(scaling.trained / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = turning(scaling.beta_fast), turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    periods = _periods(rope.theta, rope.dim)
    steps = np.arange(rope.dim // 2, dtype=np.float32)
    kept = np.float32(1) - np.clip((steps - np.float32(low)) / np.float32(high - low), np.float32(0), np.float32(1))
    interpolated = np.float32(1) / (np.float32(scaling.factor) * periods)
    mixed: np.ndarray = interpolated * (np.float32(1) - kept) + np.float32(1) / periods * kept
    return mixed
