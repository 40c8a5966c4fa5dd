"""`headrace.ops.sampling` in C++, the same bits: the arithmetic of whole lines of logits on one instruction set.

Owns nothing but the way in; what each function means is said there. Sources: csrc/sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.native import _core
from headrace.ops.sampling import Floats, Ints, Knobs


class NativeSampling:
    """`ops.sampling.Sampling`. Arrays are C-contiguous float32; TypeError for others. The interpreter's lock is let go
    of while lines are read, and one object may be used by several threads.
    """

    def __init__(self, isa: str) -> None:
        """`isa` as in `native.isas()`, amx being avx512 here; ValueError where the machine lacks it."""
        self._core = _core.Sampling(isa)

    def peaks(self, logits: Floats) -> tuple[Ints, Floats]:
        return self._core.peaks(logits)

    def pick(self, logits: Floats, knobs: Sequence[Knobs | None]) -> tuple[Ints, Floats]:
        return self._core.pick(logits, knobs)

    def weights(self, values: Floats, peak: float, temperature: float) -> Ints:
        return self._core.weights(values, peak, temperature)

    def log_total(self, values: Floats, peak: float, temperature: float) -> float:
        return self._core.log_total(values, peak, temperature)

    def rank(self, values: Floats, token: int) -> int:
        return self._core.rank(values, token)

    def top(self, values: Floats, k: int) -> Ints:
        return self._core.top(values, k)

    def score(
        self, values: Floats, peak: float, temperature: float, token: int, k: int
    ) -> tuple[float, int, tuple[tuple[int, float], ...]]:
        return self._core.score(values, peak, temperature, token, k)
