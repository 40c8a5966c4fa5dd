"""How fast the native kernels are with each format of keys and values: a prompt, then steps of one row and of many.

    python bench/kv_speed.py MODEL [MODEL ...] [--context 4096] [--rows 8] [--steps 32] [--formats f32 bf16 int8 int4]

Token ids are drawn at random: the work does not depend on them. A prompt of `--context` tokens is computed in chunks of
512; then one row, and `--rows` rows of as many tokens each, take `--steps` steps of a token. `KV read` is what a step
of one row reads of the pool. Steps are timed singly, the median counts. Logits are not computed. Markdown on standard
output; run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

from headrace.cache.pool import BLOCK, Pool, PoolShape
from headrace.config import KV_FORMATS
from headrace.hardware import threads
from headrace.loading.checkpoint import load_weights, open_checkpoint
from headrace.program.backend import Batch
from headrace.program.decoder import write_program
from headrace.program.native_backend import NativeBackend

CHUNK = 512


def measure(model: Path, kv_format: str, context: int, rows: int, steps: int) -> str:
    checkpoint = open_checkpoint(model)
    program = write_program(checkpoint.spec, checkpoint.parts, context + steps)
    kv, blocks = program.kv, -(-(context + steps) // BLOCK)
    pool = Pool(PoolShape(rows * blocks * len(kv.groups), kv.slots, kv.kv_heads, kv.dim, kv_format))
    runner = NativeBackend().load(program, load_weights(checkpoint), pool, threads(None).count)
    tables = np.arange(pool.shape.blocks, dtype=np.int32).reshape(len(kv.groups), rows, blocks)
    rng = np.random.default_rng(1)

    def step(of: range, start: int, count: int) -> float:
        batch = Batch(
            tokens=rng.integers(0, program.vocab, len(of) * count, dtype=np.int32),
            positions=np.tile(np.arange(start, start + count, dtype=np.int32), len(of)),
            offsets=np.arange(0, (len(of) + 1) * count, count, dtype=np.int32),
            lengths=np.full(len(of), start + count, np.int32),
            tables=tuple(np.ascontiguousarray(t[of.start : of.stop]) for t in tables),
            wanted=np.array([len(of) * count - 1], np.int32),
        )
        begin = time.perf_counter()
        runner.run(batch)
        return time.perf_counter() - begin

    prompt = 0.0
    for row in range(rows):
        took = [step(range(row, row + 1), at, min(CHUNK, context - at)) for at in range(0, context, CHUNK)]
        prompt = min(prompt, sum(took)) if row else sum(took)
    one, many = (statistics.median(step(range(count), context + n, 1) for n in range(steps)) for count in (1, rows))
    windows = [min(group.window or context, context) for group in kv.groups]
    read = sum(windows) * pool.shape.block_bytes / BLOCK
    cells = f"{context / prompt:,.0f} | {1 / one:.1f} | {rows / many:.1f} | {read / 1e6:.1f} MB"
    return f"| {model.stem} | {kv_format} | {cells} |"


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("models", nargs="+", type=Path)
    ask.add_argument("--context", type=int, default=4096)
    ask.add_argument("--rows", type=int, default=8)
    ask.add_argument("--steps", type=int, default=32)
    ask.add_argument("--formats", nargs="+", choices=KV_FORMATS, default=list(KV_FORMATS))
    args = ask.parse_args()
    print(f"| model | KV | prompt of {args.context}, tok/s | 1 row, tok/s | {args.rows} rows, tok/s | KV read |")
    print("|---|---|--:|--:|--:|--:|")
    for model in args.models:
        for kv_format in args.formats:
            print(measure(model, kv_format, args.context, args.rows, args.steps), flush=True)


if __name__ == "__main__":
    main()
