"""How much of the KV memory in use is allocated and holds nothing, on a recorded hour of a chat service.

    python bench/kv_waste.py MODEL TRACE.csv [--requests 128] [--every 0] [--scale 1] [--most-prompt 3072]
                             [--most-answer 1024] [--most-waste 0.04] [--options '{"rows": 16}'] [--json]

TRACE is read as by bench/policies.py: `requests` that span the hour, as often as all came. No answer of Azure's chat
trace is above 1,000 tokens; by default requests end at 4,096. Where they come faster than they are served (`scale` 2:
half as fast) they queue for the seats.

The figure is the engine's own count, by places for tokens: of all blocks in use, summed over all steps, the share that
no token was in when the step was done (`Stats.places`, `places_filled`). Exits with 1 where it is above `most-waste`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from policies import arrivals, replay

from headrace import AsyncLLM


def measure(args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {"context": args.most_prompt + args.most_answer, **json.loads(args.options)}
    llm = AsyncLLM(args.model, queue_requests=10**6, queue_tokens=10**9, **options)
    try:
        trace = arrivals(args, min(llm.model.vocab, 20_000))
        figures = asyncio.run(replay(llm, trace))
        stats = llm.stats()
    finally:
        llm.close()
    return {
        "model": Path(args.model).name,
        "requests": len(trace),
        "tokens_of_a_request": round(sum(len(one.prompt) + one.answer for one in trace) / len(trace), 1),
        "trace_s": round(trace[-1].at_s, 1),
        "time_scale": args.scale,
        "seconds": round(figures["seconds"], 1),
        "steps": stats.steps,
        "preemptions": stats.preemptions,
        "requests_in_a_step": round(figures["rows"], 2),
        "places": stats.places,
        "places_empty": stats.places - stats.places_filled,
        "waste": round(1 - stats.places_filled / stats.places, 5),
    }


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("model")
    ask.add_argument("trace", type=Path)
    for name, default in (("requests", 128), ("most-prompt", 3072), ("most-answer", 1024), ("every", 0), ("batch", 1)):
        ask.add_argument(f"--{name}", type=int, default=default)
    for name, share in (("scale", 1.0), ("most-waste", 0.04)):
        ask.add_argument(f"--{name}", type=float, default=share)
    ask.add_argument("--options", default="{}", help="of the engine, as JSON")
    ask.add_argument("--json", action="store_true")
    args = ask.parse_args()
    said = measure(args)
    print(json.dumps(said) if args.json else "\n".join(f"{key:<20} {value}" for key, value in said.items()))
    raise SystemExit(said["waste"] > args.most_waste)


if __name__ == "__main__":
    main()
