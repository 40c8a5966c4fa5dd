"""One vector out of the hidden states of a request's tokens. Owns what `mean` carries from row to row; knows no logits.

The mean is a sum in float64, one addition for each token in the order of tokens, from zero; then one division by their
number and one rounding to float32. So neither chunks nor neighbours can change a bit, and the order costs no accuracy:
float64 has 29 bits more than the states that are summed. What `last` gives is the state itself.
"""

from __future__ import annotations

import numpy as np

from headrace.execute.plan import Row, RowResult, Want

NOT_FINITE = "the model's hidden states are not finite (NaN or infinity)"


class Pooled:
    """Of one request. Every row of a `mean` must pass through `add`, whatever it wants, from the first token on."""

    __slots__ = ("_count", "_mean", "_sum")

    def __init__(self, pooling: str) -> None:
        self._mean = pooling == "mean"
        self._sum: np.ndarray | None = None
        self._count = 0
        """Tokens in the sum."""

    def reads(self, row: Row) -> range:
        """Which of the row's tokens it needs the hidden states of."""
        end = len(row.tokens)
        return range(0 if self._mean else end - (row.want == Want.HIDDEN), end)

    def add(self, row: Row, hidden: np.ndarray) -> RowResult:
        """Take in the float32 [n, width] of the tokens that it reads. ValueError where rows are missing."""
        if not self._mean:
            return _result(hidden[0]) if len(hidden) else RowResult()
        if row.start != self._count:
            raise ValueError(
                f"request {row.request}: a row at {row.start}, but {self._count} hidden states were summed"
            )
        if self._sum is None:
            self._sum = np.zeros(hidden.shape[1], np.float64)
        with np.errstate(invalid="ignore"):  # of infinities; told below
            for line in hidden:
                self._sum += line
        self._count += len(hidden)
        if row.want != Want.HIDDEN:
            return RowResult()
        return _result((self._sum / self._count).astype(np.float32))


def _result(vector: np.ndarray) -> RowResult:
    if not np.isfinite(vector).all():
        return RowResult(error=NOT_FINITE)
    return RowResult(embedding=tuple(vector.tolist()))
