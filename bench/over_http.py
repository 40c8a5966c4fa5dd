"""What HTTP costs: the same work through the Python API and over HTTP, the engine in a thread or in a process.

    python -m bench.over_http MODEL [--streams 32] [--requests 128] [--prompt 32] [--answer 128] [--repeat 3]
                              [--ways api,thread,process]

`requests` prompts of random token ids, answers of `answer` tokens, `streams` at a time (as many rows has the engine).
The load comes from raw sockets in a process of its own, whose processor time is told: on two cores it takes from the
server. The server's own, of the way `process`, lacks the engine's. The ways take turns; medians of the repeats,
Markdown on standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from typing import Any

from bench.http_load import Load, measured, tokens
from bench.serving import Server, share
from headrace import AsyncLLM, SamplingParams

FIGURES = {
    "tokens_per_s": "tok/s",
    "gap_p50_ms": "between tokens p50, ms",
    "gap_p99_ms": "p99, ms",
    "lag_p99_ms": "event loop's lag p99, ms",
    "server_cpu_s": "server's CPU, s",
    "generator_cpu_s": "generator's CPU, s",
    "seconds": "all, s",
}


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    options = {"context": args.prompt + args.answer + 64, "rows": args.streams}
    return options | {"queue_requests": 10**6, "queue_tokens": 10**9, "past_load": False}


def over_api(args: argparse.Namespace) -> dict[str, float]:
    async def work() -> dict[str, float]:
        llm = AsyncLLM(args.model, **options_of(args))
        params = SamplingParams(temperature=0, max_tokens=args.answer, ignore_eos=True)
        waiting = iter([tokens(f"own 2 {number}", args.prompt) for number in range(args.requests)])
        gaps: list[float] = []

        async def stream() -> None:
            for prompt in waiting:
                last = 0.0
                async for chunk in llm.submit(prompt, params):
                    now = time.perf_counter()
                    gaps.extend([now - last] if last and chunk.token_ids else [])
                    last = now

        await llm.generate(tokens("warm", args.prompt), params)
        begin, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(stream() for _ in range(args.streams)))
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        llm.close()
        return {
            "tokens_per_s": args.requests * args.answer / seconds,
            "gap_p50_ms": 1000 * share(gaps, 0.5),
            "gap_p99_ms": 1000 * share(gaps, 0.99),
            "server_cpu_s": cpu,
            "seconds": seconds,
        }

    return asyncio.run(work())


def over_http(args: argparse.Namespace, engine: str) -> dict[str, float]:
    server = Server(args.model, engine, options_of(args))
    asked = Load(server.url, "model", args.streams, args.requests, args.prompt, 0, args.answer)
    try:
        measured(Load(server.url, "model", 1, 1, args.prompt, 0, args.answer, own_seed=3))  # warm
        before = server.facts()
        found = measured(asked)
        after = server.facts()
    finally:
        server.close()
    return {
        "tokens_per_s": found["tokens_per_s"],
        "gap_p50_ms": 1000 * found["gap_s"]["p50"],
        "gap_p99_ms": 1000 * found["gap_s"]["p99"],
        "lag_p99_ms": 1000 * share(after.lags, 0.99),
        "server_cpu_s": after.cpu_s - before.cpu_s,
        "generator_cpu_s": found["generator_cpu_s"],
        "seconds": found["seconds"],
    }


def _apart(pipe: Any, args: argparse.Namespace) -> None:
    pipe.send(over_api(args))


def once(args: argparse.Namespace, way: str) -> dict[str, float]:
    """Each in processes of its own."""
    if way != "api":
        return over_http(args, way)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_apart, args=(there, args))
    process.start()
    found: dict[str, float] = here.recv()
    process.join()
    return found


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("model")
    for name, default in (("streams", 32), ("requests", 128), ("prompt", 32), ("answer", 128), ("repeat", 3)):
        ask.add_argument(f"--{name}", type=int, default=default)
    ask.add_argument("--ways", default="api,thread,process")
    args = ask.parse_args()
    ways = args.ways.split(",")
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(args.repeat):
        for way in ways:
            runs[way].append(once(args, way))
    print(f"{args.requests} requests, {args.streams} at a time, {args.prompt} + {args.answer} tokens\n")
    print(f"| | {' | '.join(FIGURES.values())} |\n|---" + "|--:" * len(FIGURES) + "|")
    medians = {w: {f: statistics.median(r.get(f, 0.0) for r in runs[w]) for f in FIGURES} for w in ways}
    for way, said in medians.items():
        print(f"| {way} | {' | '.join(f'{said[name]:,.4g}' for name in FIGURES)} |")
    if "api" in medians:
        for way in ways:
            part = medians[way]["tokens_per_s"] / medians["api"]["tokens_per_s"]
            print(f"\n{way}: {part:.1%} of the Python API's tokens per second", end="")
        print()


if __name__ == "__main__":
    main()
