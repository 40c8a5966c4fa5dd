"""Every logit of Headrace against transformers in float32, teacher-forced on the golden files, at every position.

    python tests/golden/compare.py FILE.gguf [FILE.gguf ...]

Prints for each prompt the largest difference as a share of the largest logit, and fails where it exceeds 1e-4.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from make import HERE, load

from headrace.cache.pool import Pool, PoolShape
from headrace.loading.checkpoint import load_weights, open_checkpoint
from headrace.program.backend import Batch, Runner
from headrace.program.decoder import write_program
from headrace.program.program import Program
from headrace.program.torch_backend import TorchBackend

CONTEXT = 2048
LIMIT = 1e-4


def logits(runner: Runner, program: Program, ids: list[int], chunk: int = 256) -> np.ndarray:
    """float32 [len(ids), vocab] by Headrace's program, in chunks, blocks in order from 0."""
    out = []
    blocks = np.arange(len(program.kv.groups) * CONTEXT // 32, dtype=np.int32).reshape(len(program.kv.groups), 1, -1)
    for start in range(0, len(ids), chunk):
        part = np.array(ids[start : start + chunk], np.int32)
        batch = Batch(
            tokens=part,
            positions=np.arange(start, start + len(part), dtype=np.int32),
            offsets=np.array([0, len(part)], np.int32),
            lengths=np.array([start + len(part)], np.int32),
            tables=tuple(blocks),
            wanted=np.arange(len(part), dtype=np.int32),
        )
        out.append(runner.logits(runner.run(batch)))
    return np.concatenate(out)


def main() -> int:
    worst = 0.0
    for file in map(Path, sys.argv[1:]):
        checkpoint = open_checkpoint(file)
        program = write_program(checkpoint.spec, checkpoint.parts, CONTEXT)
        kv = program.kv
        pool = Pool(PoolShape(len(kv.groups) * CONTEXT // 32, kv.slots, kv.kv_heads, kv.dim, "f32"))
        runner = TorchBackend().load(program, load_weights(checkpoint), pool, threads=2)
        _, model = load(file)
        for entry in json.loads((HERE / f"{file.stem}.json").read_text(encoding="utf-8"))["entries"]:
            ids = entry["prompt"] + entry["generated"]
            ours = logits(runner, program, ids)
            with torch.inference_mode():
                theirs = model(torch.tensor([ids])).logits[0].numpy()
            ratio = float((np.abs(ours - theirs).max(1) / np.abs(theirs).max(1)).max())
            worst = max(worst, ratio)
            print(f"{file.stem}: {entry['name']}: {len(ids)} positions: {ratio:.2e}", flush=True)
    print(f"largest: {worst:.2e}, allowed: {LIMIT:.0e}")
    return worst > LIMIT


if __name__ == "__main__":
    sys.exit(main())
