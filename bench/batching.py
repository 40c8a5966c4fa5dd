"""What continuous batching and chunked prompts bring on this machine.

    python bench/batching.py MODEL [--streams 1,4,16] [--tokens 64] [--repeat 3]

For each number of streams: all at once in shared steps, against one after the other (`rows=1`), and a long prompt
arriving among running streams with two step budgets. Medians over the repeats; Markdown on standard output.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import threading
import time

from headrace import LLM, SamplingParams

PROMPT = "The mill stood where the river bent twice. In spring the water came down brown and loud, and"


def rate(llm: LLM, streams: int, tokens: int) -> float:
    """Generated tokens per second over all streams, prompts included."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    begin = time.perf_counter()
    outputs = llm.generate([f"{i}. {PROMPT}" for i in range(streams)], params)
    return sum(len(o.outputs[0].token_ids) for o in outputs) / (time.perf_counter() - begin)


def longest_gap_ms(llm: LLM) -> tuple[float, float]:
    """(median, longest) ms between tokens of a running stream while a prompt of 1,500 tokens arrives."""
    ids = llm.tokenizer.encode(PROMPT * 80)[:1500]
    stream = llm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=96, ignore_eos=True))
    times = []
    other: threading.Thread | None = None
    for n, _ in enumerate(stream):
        times.append(time.perf_counter())
        if n == 32:
            other = threading.Thread(target=llm.generate, args=([ids], SamplingParams(max_tokens=1)))
            other.start()
    assert other is not None
    other.join()
    gaps = [1000 * (b - a) for a, b in itertools.pairwise(times)]
    return statistics.median(gaps[:30]), max(gaps)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("model")
    ask.add_argument("--streams", default="1,4,16")
    ask.add_argument("--tokens", type=int, default=64)
    ask.add_argument("--repeat", type=int, default=3)
    args = ask.parse_args()
    counts = [int(n) for n in args.streams.split(",")]
    rates: dict[tuple[int, int], float] = {}
    for rows in (1, 64):
        with LLM(args.model, context=4096, rows=rows) as llm:
            rate(llm, 1, 4)
            for n in counts:
                rates[rows, n] = statistics.median(rate(llm, n, args.tokens) for _ in range(args.repeat))
    print("| streams | one after the other, tok/s | in shared steps, tok/s | ratio |\n|--:|--:|--:|--:|")
    for n in counts:
        print(f"| {n} | {rates[1, n]:.1f} | {rates[64, n]:.1f} | {rates[64, n] / rates[1, n]:.2f} |")
    print("\n| budget, tokens per step | median gap, ms | longest gap while 1,500 tokens arrive, ms |\n|--:|--:|--:|")
    for budget in (64, 512):
        with LLM(args.model, context=4096, budget=budget) as llm:
            rate(llm, 1, 4)
            pairs = [longest_gap_ms(llm) for _ in range(args.repeat)]
        median, longest = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"| {budget} | {median:.0f} | {longest:.0f} |")


if __name__ == "__main__":
    main()
