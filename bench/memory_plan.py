"""Is the memory plan true? Fills the KV pool of one model and compares the peak of resident memory to the plan.

    python bench/memory_plan.py MODEL --memory 800MB [--context 2048] [--rows 64] [--temperature 0]
                                [--prompt-logprobs 1] [--json]

Requests of random tokens, as many at once as rows, together a tenth more than the pool holds. The peak is the system's
own (VmHWM): memory of the process's own, and the pages of mapped weights and libraries.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

from headrace import LLM, SamplingParams
from headrace.cache.pool import BLOCK


def status(name: str) -> int:
    """Bytes that /proc/self/status says."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def filled(args: argparse.Namespace) -> dict[str, Any]:
    options = {name: getattr(args, name) for name in ("context", "memory", "rows", "pool_bytes")}
    with LLM(args.model, **{n: v for n, v in options.items() if v is not None}) as llm:
        plan = llm.model.plan.memory.plan
        loaded, loading = status("VmRSS"), status("VmHWM")
        held = plan.blocks * BLOCK // len(plan.needs.windows)
        rows = min(plan.rows, max(1, held // 256))
        answer = (
            16 + held // llm.model.plan.options.scheduler.budget
        )  # steps until the last prompt is computed: the first must not end before
        length = min(plan.needs.context - answer, held * 11 // 10 // rows - answer)
        count = -(-held * 11 // 10 // (length + answer))
        choose = random.Random(1)
        prompts = [[choose.randrange(100, llm.model.vocab - 100) for _ in range(length)] for _ in range(count)]
        asked = {"temperature": args.temperature, "prompt_logprobs": args.prompt_logprobs}
        params = SamplingParams(max_tokens=answer, ignore_eos=True, **asked)
        begin = time.monotonic()
        at_work = threading.Thread(target=llm.generate, args=(prompts, params))
        at_work.start()
        used = 0
        while at_work.is_alive():
            used = max(used, llm.model.stats().blocks_used)
            at_work.join(0.02)
        peak = status("VmHWM")
    return {
        "model": Path(args.model).name,
        "plan": plan.total,
        "limit": plan.limit,
        "process": plan.needs.process,
        "weights": plan.needs.weights,
        "buffers": plan.needs.buffers,
        "pool": plan.pool,
        "pool_used": used * plan.needs.block,
        "requests": [count, length, answer],
        "loaded": loaded,
        "peak_loading": loading,
        "peak": peak,
        "peak_of_plan": round(peak / plan.total, 4),
        "seconds": round(time.monotonic() - begin, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--memory")
    parser.add_argument("--context", type=int)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--pool-bytes", type=int)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompt-logprobs", type=int)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = filled(args)
    if args.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:<14}{value / 1e6:12,.1f} MB" if isinstance(value, int) else f"{name:<14}{value}")


if __name__ == "__main__":
    sys.exit(main())
