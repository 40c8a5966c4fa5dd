"""Headrace, through its public API, default options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from bench.peers.child import Generate, Times, main
from bench.peers.lines import Line
from bench.peers.peer import Setting, run_engine

CONTEXT = 1024


class Headrace:
    name = "Headrace"

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def version(self) -> str:
        return version("headrace")

    def prepare(self, model: Path, lines: Sequence[Line]) -> str:
        run_engine(sys.executable, "headrace", model, lines[:1], self.setting)
        return f"default options, context={CONTEXT}"

    def measure(self, model: Path, lines: Sequence[Line]) -> dict[str, float]:
        return run_engine(sys.executable, "headrace", model, lines, self.setting)


def load(args: argparse.Namespace) -> Generate:
    from headrace import LLM, SamplingParams

    llm = LLM(args.model, context=CONTEXT, threads=args.threads, **({"isa": args.isa} if args.isa else {}))

    def generate(prompts: list[list[int]], new: int) -> Times:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        timings = [output.outputs[0].timings for output in llm.generate(prompts, params)]
        done = [t for t in timings if t is not None]
        return [t.first_token_s for t in done], [t.total_s for t in done]

    return generate


if __name__ == "__main__":
    main(load)
