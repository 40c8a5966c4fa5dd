"""OpenVINO GenAI, from the same GGUF file, through its pipeline for continuous batching."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from bench.peers.child import Generate, Times, main
from bench.peers.lines import Line
from bench.peers.peer import PeerError, Setting, installed_version, run_engine

STEP_TOKENS = 2048
"""Most tokens of one step: whole prompts at once, which is its fastest."""


class OpenVINO:
    name = "OpenVINO GenAI"

    def __init__(self, setting: Setting, python: str) -> None:
        self.setting = setting
        self.python = python

    def version(self) -> str:
        if self.setting.isa:
            raise PeerError("it cannot be told which instructions to leave alone")
        return installed_version(self.python, "openvino-genai")

    def prepare(self, model: Path, lines: Sequence[Line]) -> str:
        if model.is_dir():
            raise PeerError("it reads no safetensors")
        run_engine(self.python, "openvino", model, lines[:1], self.setting)
        return f"default options, up to {STEP_TOKENS} tokens in a step"

    def measure(self, model: Path, lines: Sequence[Line]) -> dict[str, float]:
        return run_engine(self.python, "openvino", model, lines, self.setting)


def load(args: argparse.Namespace) -> Generate:
    import numpy
    from openvino import Tensor
    from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig

    scheduler = SchedulerConfig()
    scheduler.max_num_batched_tokens = STEP_TOKENS
    pipe = ContinuousBatchingPipeline(args.model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": args.threads})

    def generate(prompts: list[list[int]], new: int) -> Times:
        greedy = GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
        first, last = [0.0] * len(prompts), [0.0] * len(prompts)
        begin = time.monotonic()
        running = [pipe.add_request(i, Tensor(numpy.array([ids])), greedy) for i, ids in enumerate(prompts)]
        while pipe.has_non_finished_requests():
            pipe.step()
            now = time.monotonic() - begin
            for i, request in enumerate(running):
                if request.can_read():
                    request.read()
                    first[i], last[i] = first[i] or now, now
        return first, last

    return generate


if __name__ == "__main__":
    main(load)
