"""Headrace: an LLM inference engine for the hardware you already have.

The public API. Names are imported on first use, so that `import headrace` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.engine.async_llm import AsyncLLM, RequestStream
    from headrace.engine.embedding import EmbeddingOutput
    from headrace.engine.llm import LLM, Stream
    from headrace.engine.outputs import Chunk, CompletionOutput, Logprob, RequestOutput
    from headrace.errors import (
        EngineDeadError,
        HeadraceError,
        ModelFileError,
        ModelNotFoundError,
        OptionError,
        OverloadedError,
        RequestError,
    )
    from headrace.params import Grammar, Reasoning, SamplingParams

_HOMES = {
    "LLM": "engine.llm",
    "AsyncLLM": "engine.async_llm",
    "Stream": "engine.llm",
    "RequestStream": "engine.async_llm",
    "Chunk": "engine.outputs",
    "CompletionOutput": "engine.outputs",
    "EmbeddingOutput": "engine.embedding",
    "Logprob": "engine.outputs",
    "RequestOutput": "engine.outputs",
    "Grammar": "params",
    "Reasoning": "params",
    "SamplingParams": "params",
    "HeadraceError": "errors",
    "RequestError": "errors",
    "OptionError": "errors",
    "OverloadedError": "errors",
    "ModelFileError": "errors",
    "ModelNotFoundError": "errors",
    "EngineDeadError": "errors",
}

__version__ = version("headrace")
__all__ = [
    "LLM",
    "AsyncLLM",
    "Chunk",
    "CompletionOutput",
    "EmbeddingOutput",
    "EngineDeadError",
    "Grammar",
    "HeadraceError",
    "Logprob",
    "ModelFileError",
    "ModelNotFoundError",
    "OptionError",
    "OverloadedError",
    "Reasoning",
    "RequestError",
    "RequestOutput",
    "RequestStream",
    "SamplingParams",
    "Stream",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    return getattr(import_module(f"headrace.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
