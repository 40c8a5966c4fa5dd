"""Large numbers (W8): the residual stream is float32 whatever the checkpoint is, and what is not finite stays apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from headrace.cache.pool import Pool, PoolShape
from headrace.config import KV_FORMATS
from headrace.program.backend import Batch
from headrace.program.decoder import write_program
from headrace.program.torch_backend import TorchBackend
from tests.models.running import Model, difference, transformers_logits
from tests.models.tiny import VOCAB, tiny_checkpoint

PROMPT = np.random.default_rng(6).integers(0, VOCAB, 60).tolist()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_w8_planted_outliers_stay_finite(dtype: str, tmp_path: Path) -> None:
    """One token's embedding reaches 3e5 after Gemma's scaling, beyond float16's 65,504: no step rounds it there."""
    folder = tiny_checkpoint(tmp_path, "gemma3_text", dtype=dtype)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"].copy()
    embedding[PROMPT[7], 3] = 3e5 / 8
    tensors["model.embed_tokens.weight"] = embedding
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model = Model.open(folder)
    assert {w.name for w in model.weights.values()} == {"F16" if dtype == "float16" else "BF16"}
    for kv_format in KV_FORMATS:
        assert np.isfinite(model.logits(PROMPT, kv_format=kv_format)).all()
    theirs = transformers_logits(folder, PROMPT)
    assert np.abs(theirs).max() > 1e5, "the outlier must reach the logits"
    assert difference(model.logits(PROMPT), theirs) < 1e-4


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["poison first", "poison last"])
@pytest.mark.parametrize(
    ("lengths", "kv_format"), [((40, 40), "f32"), ((40, 1), "f32"), ((1, 1), "f32"), ((40, 40), "int4")], ids=str
)
def test_w8_a_row_that_is_not_finite_leaves_the_others_alone(
    order: list[int], lengths: tuple[int, int], kv_format: str, tmp_path: Path
) -> None:
    """Token 0's embedding is NaN: the row that has it comes out as NaN, its neighbour as if it were alone."""
    folder = tiny_checkpoint(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"].copy()
    embedding[0] = np.nan
    save_file({**tensors, "model.embed_tokens.weight": embedding}, folder / "model.safetensors", {"format": "pt"})
    model = Model.open(folder)
    program = write_program(model.spec, model.weights, 512)
    kv = program.kv
    pool = Pool(PoolShape(8, kv.slots, kv.kv_heads, kv.dim, kv_format))
    runner = TorchBackend().load(program, model.weights, pool, 1)
    poison = [1] * (lengths[0] - 1) + [0]
    healthy = [5 + i for i in range(lengths[1])]
    alone = runner.run(_batch([healthy], [[7, 6]]))[0]
    rows = [[poison, healthy][i] for i in order]
    both = runner.run(_batch(rows, [[[3, 0], [1, 4]][i] for i in order]))
    assert np.isnan(both[order.index(0)]).all()
    assert np.isnan(runner.logits(both)[order.index(0)]).all()
    np.testing.assert_allclose(both[order.index(1)], alone, atol=1e-5)
    assert np.isfinite(runner.logits(both)[order.index(1)]).all()


def _batch(rows: list[list[int]], tables: list[list[int]]) -> Batch:
    ends = np.cumsum([len(row) for row in rows])
    return Batch(
        tokens=np.concatenate(rows).astype(np.int32),
        positions=np.concatenate([np.arange(len(row)) for row in rows]).astype(np.int32),
        offsets=np.array([0, *ends], np.int32),
        lengths=np.array([len(row) for row in rows], np.int32),
        tables=(np.array(tables, np.int32),),
        wanted=(ends - 1).astype(np.int32),
    )
