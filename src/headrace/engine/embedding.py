"""Embeddings: what a request for one looks like to the engine, and what is made of the vector that comes back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from headrace.engine.outputs import RequestOutput
from headrace.errors import EngineDeadError, HeadraceError, RequestError, shown
from headrace.params import SamplingParams


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """One prompt and its vector."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    """What was computed of it."""
    embedding: list[float]
    """float32 numbers."""
    cached: int = 0
    """How many tokens of the prompt came from the prefix cache."""


def embedding_params(
    pooling: str, *, truncate_prompt_tokens: int | None = None, cache_salt: str = "", priority: int = 0
) -> SamplingParams:
    """A request for the vector of a prompt. RequestError names the parameter that is out of range."""
    return SamplingParams(
        temperature=0,
        max_tokens=0,
        pooling=pooling,
        truncate_prompt_tokens=truncate_prompt_tokens,
        cache_salt=cache_salt,
        priority=priority,
    )


class Embedder(Protocol):
    """What is known of a model: `engine.build.Loaded`."""

    @property
    def width(self) -> int:
        """Numbers of a vector."""

    @property
    def pooling(self) -> str:
        """Where a request does not say."""


def embedding_of(model: Embedder, pooling: str | None, dimensions: int | None, **how: Any) -> SamplingParams:
    """A request to this model, `how` as for `embedding_params`, whose vector can be cut to `dimensions`. RequestError
    names the parameter that is out of range."""
    _check_dimensions(dimensions, model.width)
    return embedding_params(model.pooling if pooling is None else pooling, **how)


def _check_dimensions(dimensions: int | None, width: int) -> None:
    """RequestError where a vector of `width` numbers cannot be cut to so many."""
    if dimensions is None:
        return
    if isinstance(dimensions, bool) or not isinstance(dimensions, int) or not 1 <= dimensions <= width:
        raise RequestError(
            f"dimensions must be a whole number from 1 to {width}, the model's width, not {shown(dimensions)}",
            "dimensions",
        )


def finished(vector: Sequence[float], *, dimensions: int | None, normalize: bool) -> np.ndarray:
    """float32 [dimensions]: the vector's first numbers, then divided by their Euclidean length, unless that is 0.

    The squares are exact in float64 and summed with one rounding (`math.fsum`): the same bits on every machine.
    """
    cut = np.array(vector[:dimensions], np.float64)
    if normalize and (length := math.sqrt(math.fsum((cut * cut).tolist()))) > 0:
        cut /= length
    return cut.astype(np.float32)


def embedded(output: RequestOutput, *, dimensions: int | None, normalize: bool) -> EmbeddingOutput:
    """Of a request that has ended. EngineDeadError or HeadraceError where it brought no vector."""
    choice = output.outputs[0]
    if not output.embedding:
        kind = EngineDeadError if choice.finish_reason == "abort" else HeadraceError
        raise kind(f"{output.request_id} could not be embedded: {choice.error or 'it was aborted'}")
    vector = finished(output.embedding, dimensions=dimensions, normalize=normalize)
    cached = choice.timings.cached if choice.timings is not None else 0
    return EmbeddingOutput(output.request_id, output.prompt, output.prompt_token_ids, vector.tolist(), cached)
