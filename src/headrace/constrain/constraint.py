"""The seam of constrained answers: which tokens may come next. A member knows one answer's tokens, and nothing else."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
"""One line of a mask: bit t % 32 of word t / 32 allows token t."""

EVERY = 0xFFFFFFFF
"""A word that allows all of its tokens."""


class ConstraintError(Exception):
    """An answer cannot go on: what it may be is not known any more. The message is for its client."""


class Constraint(Protocol):
    """What one answer may be. End tokens are no part of it: who samples allows them where `accepting`.

    `take` never fails; a token that was not allowed makes the next `fill` fail. `rollback` is exact: what comes after
    is as if the tokens had never been taken.
    """

    @property
    def accepting(self) -> bool:
        """May the answer end here?"""

    @property
    def done(self) -> bool:
        """Can nothing follow but its end?"""

    def fill(self, line: Words) -> None:
        """Write which tokens may come next. ConstraintError where that is not known."""

    def take(self, token: int) -> None:
        """The next token of the answer."""

    def rollback(self, count: int) -> None:
        """Forget the last so many tokens."""
