"""What a long prompt does to the pace of answers that run: `python bench/pace.py MODEL [--streams 4] [--prompt 4000]`.

Some answers run alone, then a prompt arrives beside them. Gaps between an answer's tokens, in milliseconds, of both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from itertools import pairwise
from typing import Any

from headrace import AsyncLLM, SamplingParams


def spread(gaps: list[float]) -> dict[str, float]:
    ordered = sorted(gaps)
    return {
        "median_ms": round(1000 * statistics.median(ordered), 1),
        "p99_ms": round(1000 * ordered[int(len(ordered) * 0.99)], 1),
        "count": len(ordered),
    }


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {"context": args.prompt + 1000} | ({"budget": args.budget} if args.budget else {})
    if args.step_ms:
        options["step_ms"] = args.step_ms
    llm = await AsyncLLM.load(args.model, **options)
    choose = random.Random(1)

    def prompt(length: int) -> list[int]:
        return [choose.randrange(100, min(20_000, llm.model.vocab)) for _ in range(length)]

    arrivals: list[list[float]] = [[] for _ in range(args.streams)]
    over = asyncio.Event()

    async def answer(number: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
        while not over.is_set():
            async for chunk in await llm.stream(prompt(20), params):
                if chunk.token_ids:
                    arrivals[number].append(time.perf_counter())
                if over.is_set():
                    break

    running = [asyncio.ensure_future(answer(number)) for number in range(args.streams)]
    await asyncio.sleep(1)
    begin = time.perf_counter()
    await asyncio.sleep(args.seconds)
    came = time.perf_counter()
    first = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    await llm.generate(prompt(args.prompt), first)
    done = time.perf_counter()
    over.set()
    await asyncio.gather(*running)
    llm.close()

    def gaps(start: float, end: float) -> list[float]:
        pairs = [(a, b) for at in arrivals for a, b in pairwise(at)]
        return [b - a for a, b in pairs if start <= a and b <= end]

    quiet, beside = spread(gaps(begin, came)), spread(gaps(came, done))
    limit = 3 * quiet["median_ms"] + 50
    said = {"quiet": quiet, "beside": beside, "limit_ms": round(limit, 1), "first_token_s": round(done - came, 2)}
    return said | {"held": beside["p99_ms"] <= limit}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("model")
    ask.add_argument("--streams", type=int, default=4)
    ask.add_argument("--prompt", type=int, default=4000)
    ask.add_argument("--seconds", type=float, default=5)
    ask.add_argument("--budget", type=int)
    ask.add_argument("--step-ms", type=int)
    print(json.dumps(asyncio.run(measure(ask.parse_args())), indent=1))


if __name__ == "__main__":
    main()
