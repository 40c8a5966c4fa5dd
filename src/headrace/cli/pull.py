"""`headrace pull`: brings a model onto this machine."""

from __future__ import annotations

from headrace.cli.console import bars, out
from headrace.cli.options import MODEL


def pull(model: MODEL) -> None:
    """Download a model, unless it is here already, and print where it is."""
    from headrace.loading.resolve import resolve

    with bars() as progress:
        path = resolve(model, progress=progress)
    out(f"{path}\n")
