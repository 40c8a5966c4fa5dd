"""A recorded hour of a chat service, compressed until the pool is always short, with clients that leave.

    python bench/trace_soak.py MODEL TRACE.csv [--minutes 20] [--scale 0.05] [--in-flight 48] [--blocks 160]
                               [--leaving 0.2] [--most-prompt 2048] [--most-answer 512] [--cache-dir DIR]

TRACE is read as by bench/policies.py, over and over. Some clients leave after a random number of tokens, also before
the first. At the end every block must be back and nobody lost; some answers are asked for again, alone, by an engine
that reuses nothing, and must be the same. Exits with 1 where they are not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

from policies import Arrival, arrivals

from headrace import AsyncLLM, SamplingParams
from headrace.hardware import resident


def asked(one: Arrival, number: int) -> SamplingParams:
    """Greedy and seeded in turn."""
    return SamplingParams(
        temperature=0.8 * (number % 2), seed=number, max_tokens=one.answer, ignore_eos=True, priority=number % 3
    )


class Soak:
    """The clients, and what they saw."""

    def __init__(self, llm: AsyncLLM, args: argparse.Namespace) -> None:
        self.llm, self.args = llm, args
        self.choose = random.Random(5)
        self.answers: dict[int, tuple[int, list[int]]] = {}
        self.left = self.failed = 0

    async def client(self, number: int, which: int, one: Arrival) -> None:
        leaves = self.choose.randrange(one.answer + 1) if self.choose.random() < self.args.leaving else None
        stream = self.llm.submit(one.prompt, asked(one, number))
        tokens: list[int] = []
        if leaves == 0:
            await asyncio.sleep(self.choose.random())
            stream.abort()
            self.left += 1
            return
        async for chunk in stream:
            tokens += chunk.token_ids
            if leaves is not None and len(tokens) >= leaves:
                stream.abort()
                self.left += 1
                return
        if len(tokens) == one.answer:
            self.answers[number] = which, tokens
        else:
            self.failed += 1

    async def run(self, trace: list[Arrival]) -> list[dict[str, Any]]:
        """Until the time is over; what was seen each minute."""
        begin, number, seen = time.monotonic(), 0, list[dict[str, Any]]()
        live: set[asyncio.Task[None]] = set()
        while (passed := time.monotonic() - begin) < 60 * self.args.minutes:
            which = number % len(trace)
            due = (number // len(trace)) * (trace[-1].at_s + 1) + trace[which].at_s
            if due > passed or len(live) >= self.args.in_flight:
                await asyncio.sleep(0.01)
            else:
                task = asyncio.ensure_future(self.client(number, which, trace[which]))
                live.add(task)
                task.add_done_callback(live.discard)
                number += 1
            if passed >= 60 * len(seen):
                stats, now = self.llm.stats(), resident()
                memory = None if now is None else now.total
                seen.append({"minute": len(seen), "memory": memory, "asked": number, "blocks": stats.blocks_used})
        await asyncio.gather(*live)
        return seen


async def quiet(args: argparse.Namespace, soak: Soak, trace: list[Arrival]) -> int:
    """How many of some answers are others when asked for alone."""
    some = random.Random(7).sample(sorted(soak.answers), min(args.compare, len(soak.answers)))
    llm = AsyncLLM(args.model, context=args.most_prompt + args.most_answer, prefix_cache=False)
    other = 0
    for number in some:
        which, tokens = soak.answers[number]
        output = await llm.submit(trace[which].prompt, asked(trace[which], number)).drain()
        other += output.outputs[0].token_ids != tokens
    llm.close()
    return other


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {"context": args.most_prompt + args.most_answer, "rows": 16, "queue_requests": 10**6}
    options |= {"cache_dir": args.cache_dir} if args.cache_dir else {}
    probe = AsyncLLM(args.model, **options)
    options["pool_bytes"] = args.blocks * probe.model.plan.memory.pool.block_bytes
    vocab = min(probe.model.vocab, 20_000)
    probe.close()
    llm = AsyncLLM(args.model, **options)
    trace = arrivals(args, vocab)
    soak = Soak(llm, args)
    seen = await soak.run(trace)
    until = time.monotonic() + 5
    while (llm.stats().running or llm.stats().waiting or llm.stats().blocks_used) and time.monotonic() < until:
        await asyncio.sleep(0.05)
    stats = llm.stats()
    llm.close()
    said: dict[str, Any] = {
        "answered": len(soak.answers),
        "left": soak.left,
        "failed": soak.failed,
        "minutes": seen,
        "preemptions": stats.preemptions,
        "aborts": stats.aborts,
        "waste": round(1 - stats.places_filled / max(1, stats.places), 4),
        "prefix_hits": round(stats.prefix_hits / max(1, stats.prefix_asked), 4),
        "tier": [stats.tier_saves, stats.tier_loads],
        "over": [stats.running, stats.waiting, stats.blocks_used],
    }
    said["others_when_quiet"] = await quiet(args, soak, trace)
    said["held"] = said["over"] == [0, 0, 0] and not soak.failed and not said["others_when_quiet"]
    return said


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("model")
    ask.add_argument("trace", type=Path)
    for name, default in (("minutes", 20.0), ("scale", 0.05), ("leaving", 0.2)):
        ask.add_argument(f"--{name}", type=float, default=default)
    for name, default in (
        ("in-flight", 48),
        ("blocks", 160),
        ("compare", 40),
        ("requests", 2000),
        ("every", 1),
        ("batch", 1),
    ):
        ask.add_argument(f"--{name}", type=int, default=int(default))
    for name, default in (("most-prompt", 2048), ("most-answer", 512)):
        ask.add_argument(f"--{name}", type=int, default=int(default))
    ask.add_argument("--cache-dir")
    said = asyncio.run(measure(ask.parse_args()))
    print(json.dumps(said, indent=1))
    raise SystemExit(not said["held"])


if __name__ == "__main__":
    main()
