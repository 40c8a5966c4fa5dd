"""Running a checkpoint's program without engine or tokenizer: a pool, scattered block tables, prompts cut at will."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from headrace.cache.pool import BLOCK, Pool, PoolShape
from headrace.formats.format import Format
from headrace.loading.configs import gguf_config
from headrace.loading.gguf import GGUF
from headrace.loading.names import match_names
from headrace.loading.safetensors import Safetensors
from headrace.models.registry import family
from headrace.models.spec import Spec
from headrace.program.backend import Backend, Batch
from headrace.program.decoder import write_program
from headrace.program.native_backend import NativeBackend
from headrace.program.torch_backend import TorchBackend

TORCH = TorchBackend()
BACKENDS = pytest.mark.parametrize("backend", [TORCH, NativeBackend()], ids=lambda backend: backend.name)


@dataclasses.dataclass
class Model:
    """A spec and its weights, ready to be run as often and as differently as a test likes."""

    spec: Spec
    weights: dict[str, Format]

    @classmethod
    def open(cls, path: Path) -> Model:
        source = GGUF(path) if path.is_file() else Safetensors(path)
        spec = family(gguf_config(source) if path.is_file() else source.metadata)
        weights = {}
        for name, part in match_names(source, spec).items():
            tensor = source.read(part.tensor)
            weights[name] = tensor if part.rows is None else tensor.shard(part.rows)
        return cls(spec, weights)

    def logits(
        self,
        tokens: Sequence[int],
        *,
        chunks: Sequence[int] = (),
        context: int | None = None,
        kv_format: str = "f32",
        wanted: Sequence[int] | None = None,
        spec: Spec | None = None,
        threads: int = 1,
        backend: Backend = TORCH,
    ) -> np.ndarray:
        """float32 [wanted (all), vocab] for one prompt, cut after the positions in `chunks`, its blocks scattered."""
        program = write_program(spec or self.spec, self.weights, context or self.spec.context)
        kv, count = program.kv, -(-len(tokens) // BLOCK)
        pool = Pool(PoolShape(count * len(kv.groups) + 3, kv.slots, kv.kv_heads, kv.dim, kv_format))
        ids = np.random.default_rng(5).permutation(count * len(kv.groups) + 3)[: count * len(kv.groups)]
        tables = tuple(t[None].astype(np.int32) for t in np.split(ids, len(kv.groups)))
        runner = backend.load(program, self.weights, pool, threads)
        picked = np.arange(len(tokens)) if wanted is None else np.asarray(wanted)
        out = []
        for start, stop in zip([0, *chunks], [*chunks, len(tokens)], strict=True):
            of_chunk = picked[(picked >= start) & (picked < stop)] - start
            hidden = runner.run(
                Batch(
                    tokens=np.array(tokens[start:stop], np.int32),
                    positions=np.arange(start, stop, dtype=np.int32),
                    offsets=np.array([0, stop - start], np.int32),
                    lengths=np.array([stop], np.int32),
                    tables=tuple(np.ascontiguousarray(t[:, : -(-stop // BLOCK)]) for t in tables),
                    wanted=of_chunk.astype(np.int32),
                )
            )
            out.append(runner.logits(hidden).copy())
        return np.concatenate(out)


@torch.inference_mode()
def transformers_logits(
    path: Path, tokens: Sequence[int], *, attention: str = "eager", layers: int | None = None
) -> np.ndarray:
    """float32 [tokens, vocab] of transformers; `layers`: only the first so many."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention)
    if layers is not None:
        model.model.layers = model.model.layers[:layers]
    logits: np.ndarray = model(torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()
    return logits


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Largest |difference| as a share of the largest |logit|."""
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())
