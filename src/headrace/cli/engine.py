"""The one place where a command opens a model. Imports the engine, and with it the heavy packages, only then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.cli.console import bars

if TYPE_CHECKING:
    from headrace.engine.llm import LLM


def open_llm(model: str, engine: dict[str, Any]) -> LLM:
    """Find, fetch and load a model, with progress bars."""
    from headrace.engine.llm import LLM

    with bars() as progress:
        progress(f"opening {model}", 0, 0)
        return LLM(model, progress=progress, **engine)
