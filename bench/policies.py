"""Continuous, dynamic and static batching on the same arrivals: a recorded hour of a chat service, replayed.

    python bench/policies.py MODEL TRACE.csv [--requests 192] [--every 0] [--scale 1[,2,...]] [--most-prompt 32]
                             [--most-answer 1000] [--batch 8] [--max-wait-ms 100]
                             [--policies continuous,dynamic,static] [--repeat 3] [--threads N]
                             [--json OUT.json] [--plot OUT.png]

TRACE has the columns TIMESTAMP, ContextTokens and GeneratedTokens (Azure's LLM inference traces). Every `every`th of
its requests is taken (0: so that `requests` of them span all of it), their times divided by that, so that they come as
often as all did, and multiplied by `scale` (2: half as often); lengths above `most-prompt` and `most-answer` are cut to
that. Prompts are random token ids, nothing is shared; answers are greedy and exactly as long as recorded. Every
policy has at most `batch` requests in a step, so the difference is when they begin. The number of requests is rounded
up to whole batches, so that static never waits for one that does not come.

The defaults are a load that shows what policies can differ in: answers whole (Azure's end at 1,000), since unequal
lengths are what empties seats; prompts short, since computing them costs every policy the same; and requests faster
than two cores answer them (5.4 a second), so that throughput is capacity and not the rate of arrivals. What is
printed below the table takes the factor in throughput apart: full seats save steps, as often as lengths alone say,
but a step with empty seats is also quicker, the more so the fewer cores compute it.

With several scales every policy has its curve, throughput over the p99 of the first token, and what counts is the
throughput that each reaches while that p99 stays within a limit: the least that static reaches at any scale. Static
batches wait to be full when requests are few and for each other when they are many, so that least is not small.

Each request goes through `AsyncLLM` in this process. Throughput counts generated tokens from the first arrival to the
last token; first token and queue count from the arrival, so waiting is in them; gaps are those between a request's
steps with tokens. Medians over the repeats, in which the policies take turns; Markdown on standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import heapq
import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from headrace import AsyncLLM, SamplingParams

FIGURES = {
    "tokens_per_s": "generated, tok/s",
    "first_p50_s": "first token p50, s",
    "first_p99_s": "p99, s",
    "gap_p50_ms": "between tokens p50, ms",
    "gap_p99_ms": "p99, ms",
    "queue_p50_s": "in the queue p50, s",
    "queue_p99_s": "p99, s",
    "rows": "requests in a step, mean",
    "seconds": "all, s",
}
"""What is reported of each policy, and how the table calls it."""


@dataclass(frozen=True)
class Arrival:
    at_s: float
    prompt: list[int]
    answer: int


def arrivals(args: argparse.Namespace, vocab: int, scale: float = 1.0) -> list[Arrival]:
    """The trace as it is replayed; the same at every call."""
    count = -(-args.requests // args.batch) * args.batch
    with args.trace.open(newline="") as file:
        every_line = list(csv.DictReader(file))
    every = args.every or max(1, len(every_line) // count)
    lines = every_line[::every][:count]
    if len(lines) < count:
        raise SystemExit(f"{args.trace} has {len(every_line)} requests, fewer than {count} times {every}")
    times = [datetime.fromisoformat(line["TIMESTAMP"][:26]) for line in lines]
    choose = random.Random(1)
    return [
        Arrival(
            at_s=(at - times[0]).total_seconds() * scale / every,
            prompt=[choose.randrange(100, vocab) for _ in range(min(int(line["ContextTokens"]), args.most_prompt))],
            answer=min(int(line["GeneratedTokens"]), args.most_answer),
        )
        for at, line in zip(times, lines, strict=True)
    ]


@dataclass
class Answered:
    asked: float
    at: list[float]
    """When each step's tokens came."""
    tokens: int
    queued_s: float


async def answered(llm: AsyncLLM, one: Arrival, begin: float) -> Answered:
    await asyncio.sleep(begin + one.at_s - time.monotonic())
    asked, at, tokens, queued = time.monotonic(), list[float](), 0, 0.0
    params = SamplingParams(temperature=0, max_tokens=one.answer, ignore_eos=True)
    async for chunk in llm.submit(one.prompt, params):
        if chunk.token_ids:
            at.append(time.monotonic())
            tokens += len(chunk.token_ids)
        if chunk.timings is not None:
            queued = chunk.timings.queued_s
        if chunk.error is not None:
            raise SystemExit(f"a request failed: {chunk.error}")
    return Answered(asked, at, tokens, queued)


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


async def replay(llm: AsyncLLM, trace: Sequence[Arrival]) -> dict[str, float]:
    """One run of the whole trace: `FIGURES`."""
    await llm.generate(trace[0].prompt[:16], SamplingParams(temperature=0, max_tokens=4))  # warm
    steps = llm.stats().steps
    begin = time.monotonic()
    done = await asyncio.gather(*(answered(llm, one, begin) for one in trace))
    seconds = max(d.at[-1] for d in done) - min(d.asked for d in done)
    first = [d.at[0] - d.asked for d in done]
    gaps = [1000 * (b - a) for d in done for a, b in itertools.pairwise(d.at)] or [0.0]
    queue = [d.queued_s for d in done]
    return {
        "tokens_per_s": sum(d.tokens for d in done) / seconds,
        "first_p50_s": statistics.median(first),
        "first_p99_s": quantile(first, 0.99),
        "gap_p50_ms": statistics.median(gaps),
        "gap_p99_ms": quantile(gaps, 0.99),
        "queue_p50_s": statistics.median(queue),
        "queue_p99_s": quantile(queue, 0.99),
        "rows": sum(len(d.at) for d in done) / max(1, llm.stats().steps - steps),
        "seconds": seconds,
    }


def measured(args: argparse.Namespace, policy: str, scale: float) -> dict[str, float]:
    options: dict[str, Any] = {"rows": args.batch, "policy": policy, "queue_requests": 10**6, "queue_tokens": 10**9}
    options |= {"context": args.most_prompt + args.most_answer}
    if args.threads:
        options["threads"] = args.threads
    if policy == "dynamic":
        options["max_wait_ms"] = args.max_wait_ms
    llm = AsyncLLM(args.model, **options)
    try:
        return asyncio.run(replay(llm, arrivals(args, min(llm.model.vocab, 20_000), scale)))
    finally:
        llm.close()


def counted_steps(answers: Sequence[int], batch: int) -> dict[str, int]:
    """Steps with tokens that the answers take where all wait from the start and prompts cost none, by arithmetic."""
    seats = [0] * batch
    for answer in answers:
        heapq.heapreplace(seats, seats[0] + answer)
    return {
        "continuous": max(seats),
        "static": sum(max(answers[i : i + batch]) for i in range(0, len(answers), batch)),
    }


def reasons(figures: dict[str, dict[str, float]], answers: Sequence[int], batch: int) -> str:
    """Where the factor of continuous over static comes from, in figures that were counted."""
    own, other, steps = figures["continuous"], figures["static"], counted_steps(answers, batch)
    own_ms, other_ms = (1000 * f["rows"] / f["tokens_per_s"] for f in (own, other))
    return (
        f"Continuous over static: {own['tokens_per_s'] / other['tokens_per_s']:.2f} times the throughput at "
        f"{own['first_p99_s'] / other['first_p99_s']:.2f} times the p99 of the first token.\n"
        f"- By the lengths of the answers alone: {steps['static']:,} steps in static batches of {batch}, "
        f"{steps['continuous']:,} where seats are filled at once: {steps['static'] / steps['continuous']:.2f} times.\n"
        f"- Counted: {own['rows']:.2f} requests in a step ({1 - own['rows'] / batch:.0%} of the seats empty) beside "
        f"{other['rows']:.2f} ({1 - other['rows'] / batch:.0%}): {own['rows'] / other['rows']:.2f} times.\n"
        f"- A step took {own_ms:.1f} ms beside {other_ms:.1f}, prompts and idling included: empty seats make "
        f"a step {own_ms / other_ms:.2f} times as quick, and the throughput is the one factor divided by the other."
    )


def within_limit(curves: dict[float, dict[str, dict[str, float]]]) -> str:
    """The most that each policy gives while the p99 of the first token is no worse than static's best."""
    limit, at = min((figures["static"]["first_p99_s"], scale) for scale, figures in curves.items())
    best: dict[str, tuple[float, float, float]] = {}
    for scale, figures in curves.items():
        for policy, said in figures.items():
            if said["first_p99_s"] <= limit:
                best[policy] = max(
                    best.get(policy, (0.0, 0.0, 0.0)), (said["tokens_per_s"], said["first_p99_s"], scale)
                )
    lines = [
        f"- {policy}: {tokens:,.0f} tok/s at x {scale:g}, p99 {first:.1f} s, "
        f"{tokens / best['static'][0]:.2f} times static's"
        for policy, (tokens, first, scale) in best.items()
    ]
    said = f"Within {limit:.1f} s to the first token (p99), the least that static reaches (at times x {at:g}):"
    return "\n".join([said, *lines])


def table(figures: dict[str, dict[str, float]]) -> str:
    lines = [f"| policy | {' | '.join(FIGURES.values())} |", "|---" + "|--:" * len(FIGURES) + "|"]
    for policy, said in figures.items():
        lines.append(f"| {policy} | {' | '.join(f'{said[name]:,.{_digits(said[name])}f}' for name in FIGURES)} |")
    return "\n".join(lines)


def _digits(value: float) -> int:
    return 0 if value >= 100 else 1 if value >= 10 else 2


def plot(figures: dict[str, dict[str, float]], path: Path, title: str) -> None:
    """Throughput, the wait for the first token and the gaps, side by side."""
    from matplotlib import pyplot

    panels = {
        "generated, tok/s": {"": "tokens_per_s"},
        "to the first token, s": {"p50": "first_p50_s", "p99": "first_p99_s"},
        "between tokens, ms": {"p50": "gap_p50_ms", "p99": "gap_p99_ms"},
    }
    figure, axes = pyplot.subplots(1, len(panels), figsize=(12, 3.6), layout="constrained")
    names = list(figures)
    for axis, (label, bars) in zip(axes, panels.items(), strict=True):
        width = 0.8 / len(bars)
        for number, (bar, key) in enumerate(bars.items()):
            places = [i + (number - (len(bars) - 1) / 2) * width for i in range(len(names))]
            drawn = axis.bar(places, [figures[name][key] for name in names], width, label=bar or None)
            axis.bar_label(drawn, fmt="%.3g", fontsize=8)
        axis.set_xticks(range(len(names)), names)
        axis.set_title(label)
        if len(bars) > 1:
            axis.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)


def plot_curves(curves: dict[float, dict[str, dict[str, float]]], path: Path, title: str) -> None:
    """Throughput over the p99 of the first token, a line for each policy."""
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for policy in next(iter(curves.values())):
        points = [curves[scale][policy] for scale in sorted(curves)]
        axis.plot(*zip(*((p["first_p99_s"], p["tokens_per_s"]) for p in points), strict=True), "o-", label=policy)
    axis.set(xlabel="to the first token, p99, s", ylabel="generated, tok/s", xscale="log")
    axis.legend()
    figure.suptitle(title, fontsize=8)
    figure.savefig(path, dpi=150)


def arguments() -> argparse.Namespace:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("model")
    ask.add_argument("trace", type=Path)
    for name, default in (("requests", 192), ("every", 0), ("most-prompt", 32), ("most-answer", 1000), ("batch", 8)):
        ask.add_argument(f"--{name}", type=int, default=default)
    ask.add_argument("--scale", default="1")
    ask.add_argument("--max-wait-ms", type=int, default=100)
    ask.add_argument("--policies", default="continuous,dynamic,static")
    ask.add_argument("--repeat", type=int, default=3)
    ask.add_argument("--threads", type=int)
    ask.add_argument("--json", type=Path)
    ask.add_argument("--plot", type=Path)
    args = ask.parse_args()
    if args.plot is not None:  # before an hour of measuring
        try:
            import matplotlib

            matplotlib.use("agg")
        except ModuleNotFoundError:
            ask.error("--plot needs matplotlib: pip install 'headrace[report]'; or leave the option out")
    return args


def main() -> None:
    args = arguments()
    policies, scales = args.policies.split(","), [float(scale) for scale in args.scale.split(",")]
    runs: dict[float, dict[str, list[dict[str, float]]]] = {scale: {p: [] for p in policies} for scale in scales}
    for _, scale, policy in itertools.product(range(args.repeat), scales, policies):
        runs[scale][policy].append(measured(args, policy, scale))
    curves = {
        scale: {p: {name: statistics.median(run[name] for run in done[p]) for name in FIGURES} for p in policies}
        for scale, done in runs.items()
    }
    count = -(-args.requests // args.batch) * args.batch
    for scale, figures in curves.items():
        what = (
            f"{Path(args.model).name}: {count} requests of {args.trace.name}, times x {scale:g}, prompts to "
            f"{args.most_prompt} and answers to {args.most_answer} tokens, at most {args.batch} at once, "
            f"medians of {args.repeat}"
        )
        print(f"{what}\n\n{table(figures)}\n")
        if {"continuous", "static"} <= figures.keys():
            answers = [one.answer for one in arrivals(args, 20_000)]
            print(f"{reasons(figures, answers, args.batch)}\n")
    if len(curves) > 1 and "static" in policies:
        print(within_limit(curves))
    if args.json is not None:
        said = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
        args.json.write_text(json.dumps({"options": said, "medians": curves, "runs": runs}, indent=1) + "\n")
    if args.plot is not None:
        if len(curves) > 1:
            plot_curves(curves, args.plot, what.replace(f"x {scale:g}", f"x {args.scale}"))
        else:
            plot(curves[scales[0]], args.plot, what)


if __name__ == "__main__":
    main()
