"""Windows over texts that are longer than the context: which tokens of the text a request computes. Pure arithmetic.

A window holds at most `size` tokens. When it is full, the next one begins half a window later; what both have in
common is computed anew, at the positions that it has there, since keys are stored rotated by their position. Where
windows begin depends on the length of the text alone: so a token has the same window before it whether it stood in the
prompt or was answered, and whatever else ran.

`sinks` first tokens of the text stay in every window: attention leans on them, and without them models lose the thread
(StreamingLLM: Xiao et al. 2023, arXiv:2309.17453).
"""

from __future__ import annotations

from dataclasses import dataclass

SINKS = 4
"""First tokens that `overflow: sinks` keeps; the paper found four to be enough."""
LEAST = 4 * SINKS
"""Smallest window: half of it is kept, and more than the sinks of that."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of `size` tokens, of which the first `sinks` are those of the text."""

    size: int
    sinks: int = 0

    @property
    def step(self) -> int:
        """Tokens that leave when a window is full."""
        return self.size // 2

    def left_out(self, length: int) -> int:
        """Tokens left out, after the sinks, by the window from which the token at index `length` is chosen."""
        return 0 if length < self.size else ((length - self.size) // self.step + 1) * self.step
