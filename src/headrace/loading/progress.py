"""How long tasks of loading say how far they are."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""(what is being done, bytes done, bytes in all or 0 where that is unknown). Called often, on the working thread."""


def silent(_task: str, _done: int, _total: int) -> None:
    """A `Progress` for nobody."""
