"""How a test calls an implementation of an operation with a case."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from headrace.ops.attention import KVIndex
from headrace.ops.kv import Stored
from headrace.ops.op import Case, Implementation, KVCase, Op


def index_of(kv: KVCase, heads: int) -> KVIndex:
    return KVIndex.of(
        kv.positions,
        kv.offsets,
        kv.lengths,
        kv.table,
        window=kv.window,
        heads=heads,
        kv_heads=kv.kv_heads,
        block=32,
        dim=kv.dim,
    )


def call(op: Op, implementation: Implementation, case: Case) -> np.ndarray:
    """The output, or for an operation that has none the pool afterwards. The case is left as it was."""
    arguments = [torch.from_numpy(a.copy()) for a in (*case.inputs, *case.weights)]
    extra: dict[str, Any] = {}
    pool = None
    if case.kv is not None:
        pool = case.kv.pool.copy()
        heads = case.inputs[0].shape[1] // case.kv.dim
        extra = {
            "index": index_of(case.kv, heads),
            "pool": Stored(torch.from_numpy(pool), case.kv.kv_format, case.kv.kv_heads, case.kv.dim),
        }
    output = implementation(*arguments, **case.attrs, **extra)
    if not op.signature.output:
        assert output is None
        assert pool is not None
        return pool
    if case.kv is not None and pool is not None:
        assert pool.tobytes() == case.kv.pool.tobytes(), "an operation with an output must not write the pool"
    array: np.ndarray = output.numpy()
    return array
