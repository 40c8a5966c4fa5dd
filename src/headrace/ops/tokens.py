"""Operations on whole token lines: looking up embeddings, choosing the lines that are wanted."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from headrace.ops import signatures
from headrace.ops.op import Case, Op


def embed(tokens: Tensor, table: Tensor, *, scale: float) -> Tensor:
    """Lines of a table, times a float32 factor.

    tokens int32 [n], table float32 [vocab, width] → float32 [n, width].
    """
    lines = torch.nn.functional.embedding(tokens, table)
    return lines if scale == 1.0 else lines * torch.tensor(scale, dtype=torch.float32)


def select(x: Tensor, wanted: Tensor) -> Tensor:
    """Some lines, in the order asked for: x float32 [n, width], wanted int32 [m] → float32 [m, width]."""
    return x.index_select(0, wanted)


def _embed_cases(rng: np.random.Generator) -> Iterator[Case]:
    for name, count, width, scale in [("plain", 5, 24, 1.0), ("scaled", 1, 8, 25.298221588134766)]:
        tokens = rng.integers(0, 11, count).astype(np.int32)
        yield Case(name, (tokens,), (rng.standard_normal((11, width), np.float32),), {"scale": scale})


def _select_cases(rng: np.random.Generator) -> Iterator[Case]:
    x = rng.standard_normal((7, 6), np.float32)
    for name, wanted in [("some", [0, 3, 6]), ("none", []), ("all", list(range(7)))]:
        yield Case(name, (x, np.array(wanted, np.int32)))


EMBED = Op(signatures.EMBED, embed, _embed_cases, 2e-7)
SELECT = Op(signatures.SELECT, select, _select_cases, 0.0)
