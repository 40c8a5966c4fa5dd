"""What small formats of keys and values cost: perplexity, KL divergence and first choices on a text, by KV format.

    python bench/kv_formats.py TEXT MODEL [MODEL ...] [--tokens 8192] [--window 2048] [--formats f32 bf16 int8 int4]

The text's first tokens are cut into windows; each is a prompt of its own, in chunks of 512 tokens, without a begin
token put before it, and every token but a window's first is scored. KL is the divergence of the format's distribution
over the whole vocabulary from that of bfloat16, in nats a token: the mean, and what one position in a hundred exceeds.
`same choice` counts the positions at which the likeliest token is that of bfloat16. Everything is computed by native
kernels from the same weights, so all differences are of keys and values. Markdown on standard output.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headrace.cache.pool import BLOCK, Pool, PoolShape
from headrace.config import KV_FORMATS
from headrace.hardware import threads
from headrace.loading.checkpoint import Checkpoint, load_weights, open_checkpoint
from headrace.program.backend import Batch, Runner
from headrace.program.decoder import write_program
from headrace.program.native_backend import NativeBackend

CHUNK = 512
BASE = "bf16"
SLICE = 64
"""Positions whose logits are made at once."""


def hidden_states(checkpoint: Checkpoint, windows: Sequence[np.ndarray], kv_format: str) -> tuple[np.ndarray, Runner]:
    """float32 [windows, tokens, width]: final hidden states; and the runner that made them."""
    length = len(windows[0])
    program = write_program(checkpoint.spec, checkpoint.parts, length)
    kv, blocks = program.kv, -(-length // BLOCK)
    pool = Pool(PoolShape(blocks * len(kv.groups), kv.slots, kv.kv_heads, kv.dim, kv_format))
    runner = NativeBackend().load(program, load_weights(checkpoint), pool, threads(None).count)
    ids = np.arange(blocks * len(kv.groups), dtype=np.int32).reshape(len(kv.groups), 1, blocks)
    out = np.empty((len(windows), length, program.width), np.float32)
    for lines, tokens in zip(out, windows, strict=True):
        pool.clear(ids.reshape(-1).tolist())
        for start in range(0, length, CHUNK):
            stop = min(start + CHUNK, length)
            batch = Batch(
                tokens=tokens[start:stop],
                positions=np.arange(start, stop, dtype=np.int32),
                offsets=np.array([0, stop - start], np.int32),
                lengths=np.array([stop], np.int32),
                tables=tuple(ids),
                wanted=np.arange(stop - start, dtype=np.int32),
            )
            lines[start:stop] = runner.run(batch)
    return out, runner


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits - logits.max(1, keepdims=True)
    x -= np.log(np.exp(x).sum(1, keepdims=True))
    return x


def compare(
    states: dict[str, np.ndarray], windows: Sequence[np.ndarray], runner: Runner
) -> dict[str, tuple[float, np.ndarray, float]]:
    """By format: perplexity, KL from the base at each position, share of positions with the base's first choice."""
    losses: dict[str, float] = dict.fromkeys(states, 0.0)
    divergence: dict[str, list[np.ndarray]] = {name: [] for name in states}
    same = dict.fromkeys(states, 0)
    count = 0
    for number, tokens in enumerate(windows):
        for start in range(0, len(tokens) - 1, SLICE):
            stop = min(start + SLICE, len(tokens) - 1)
            following = tokens[start + 1 : stop + 1]
            base = log_softmax(runner.logits(states[BASE][number, start:stop].copy()))
            chances, first = np.exp(base), base.argmax(1)
            count += stop - start
            for name, hidden in states.items():
                told = base if name == BASE else log_softmax(runner.logits(hidden[number, start:stop].copy()))
                losses[name] -= float(told[np.arange(stop - start), following].sum())
                divergence[name].append((chances * (base - told)).sum(1))
                same[name] += int((told.argmax(1) == first).sum())
    return {
        name: (math.exp(losses[name] / count), np.concatenate(divergence[name]), same[name] / count) for name in states
    }


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("text", type=Path)
    ask.add_argument("models", nargs="+", type=Path)
    ask.add_argument("--tokens", type=int, default=8192)
    ask.add_argument("--window", type=int, default=2048)
    ask.add_argument("--formats", nargs="+", choices=KV_FORMATS, default=list(KV_FORMATS))
    args = ask.parse_args()
    print("| model | KV | perplexity | KL, mean | KL, 99th percentile | same choice |\n|---|---|--:|--:|--:|--:|")
    for model in args.models:
        checkpoint = open_checkpoint(model)
        ids = np.array(checkpoint.tokenizer.encode(args.text.read_text(encoding="utf-8"))[: args.tokens], np.int32)
        windows = [ids[i : i + args.window] for i in range(0, len(ids) - args.window + 1, args.window)]
        states = {}
        for name in dict.fromkeys((BASE, *args.formats)):
            states[name], runner = hidden_states(checkpoint, windows, name)
        found = compare(states, windows, runner)
        base = found[BASE][0]
        for name in args.formats:
            perplexity, divergence, same = found[name]
            change = f"{perplexity:.4f} ({100 * (perplexity / base - 1):+.2f} %)"
            worst = np.quantile(divergence, 0.99)
            print(f"| {model.stem} | {name} | {change} | {divergence.mean():.5f} | {worst:.4f} | {100 * same:.2f} % |")


if __name__ == "__main__":
    main()
