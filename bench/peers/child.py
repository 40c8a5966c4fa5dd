"""The part of `peer.run_engine` on the other side: what an engine's own process does. The standard library alone."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence

from bench.peers.lines import LINES, START, Line, figure, prompts

Times = tuple[Sequence[float], Sequence[float]]
Generate = Callable[[list[list[int]], int], Times]
"""(prompts, new tokens of each) to seconds until each one's first and last token, greedy, ends ignored."""
Load = Callable[[argparse.Namespace], Generate]


def main(load: Load) -> None:
    """Loads the model, generates a first token, then each line twice, and prints the second times' figures."""
    ask = argparse.ArgumentParser()
    ask.add_argument("model")
    ask.add_argument("--threads", type=int, required=True)
    ask.add_argument("--lines", default="")
    ask.add_argument("--isa")
    args = ask.parse_args()
    generate = load(args)
    generate(prompts(START), 1)
    first_token_at = time.monotonic()
    figures = {name: _measure(generate, LINES[name]) for name in args.lines.split(",") if name}
    print(json.dumps({"first_token_at": first_token_at, "figures": figures}), flush=True)


def _measure(generate: Generate, line: Line) -> float:
    generate(prompts(line), min(line.new, 4))
    return figure(line, *generate(prompts(line), line.new))
