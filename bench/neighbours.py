"""Decoding beside busy processes: what is left of the quiet speed, and how long the longest steps are.

    python bench/neighbours.py MODEL [MODEL ...] [--neighbours 2] [--tokens 200] [--repeat 3]

A neighbour is a process that computes without end. For each model quiet and loaded runs alternate; medians over the
repeats of tokens per second, of the median and of the 99th percentile of the time between tokens. Markdown on standard
output.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace import LLM, SamplingParams

PROMPT = "The mill stood where the river bent twice. In spring the water came down brown and loud, and"


@dataclass(frozen=True)
class Run:
    """One stream, decoded."""

    rate: float
    """Tokens per second after the first."""
    median_ms: float
    p99_ms: float


def decode(llm: LLM, tokens: int) -> Run:
    stream = llm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
    times = [time.perf_counter() for _ in stream]
    gaps = sorted(b - a for a, b in itertools.pairwise(times))
    return Run(
        rate=len(gaps) / sum(gaps),
        median_ms=1000 * statistics.median(gaps),
        p99_ms=1000 * gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))],
    )


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.5)
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("models", nargs="+")
    ask.add_argument("--neighbours", type=int, default=2)
    ask.add_argument("--tokens", type=int, default=200)
    ask.add_argument("--repeat", type=int, default=3)
    args = ask.parse_args()
    print("| model | | tok/s | share of quiet | median step, ms | p99 step, ms | p99 / loaded median |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for model in args.models:
        runs: dict[str, list[Run]] = {"quiet": [], "loaded": []}
        with LLM(model, context=1024) as llm:
            decode(llm, 32)
            for _ in range(args.repeat):
                runs["quiet"].append(decode(llm, args.tokens))
                with neighbours(args.neighbours):
                    runs["loaded"].append(decode(llm, args.tokens))
        rates = {kind: statistics.median(r.rate for r in found) for kind, found in runs.items()}
        for kind, found in runs.items():
            median = statistics.median(r.median_ms for r in found)
            p99 = statistics.median(r.p99_ms for r in found)
            print(
                f"| {Path(model).stem} | {kind} | {rates[kind]:.1f} | {rates[kind] / rates['quiet']:.0%} "
                f"| {median:.1f} | {p99:.1f} | {p99 / median:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
