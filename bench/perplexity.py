"""Perplexity of model files on a text: what number formats cost, beside the float32 reference on the same weights.

    python bench/perplexity.py TEXT MODEL [MODEL ...] [--tokens 32768] [--window 2048] [--reference]

The text's first tokens are cut into windows; each is a prompt of its own, without a begin token put before it, and
every token but a window's first is scored. `--reference` computes the same with the torch backend in float32 (KV too),
which needs the extra of that name and much more time. Markdown on standard output.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

from headrace import LLM, SamplingParams


def perplexity(model: str, text: str, tokens: int, window: int, **options: str) -> tuple[float, float]:
    """(perplexity, seconds)."""
    with LLM(model, context=window + 1, **options) as llm:
        ids = llm.tokenizer.encode(text)[:tokens]
        windows = [ids[i : i + window] for i in range(0, len(ids) - window + 1, window)]
        begin = time.perf_counter()
        total, count = 0.0, 0
        for prompt in windows:
            output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))[0]
            assert output.prompt_logprobs is not None
            for token, scored in zip(prompt[1:], output.prompt_logprobs[1:], strict=True):
                assert scored is not None
                total -= scored[token].logprob
                count += 1
        return math.exp(total / count), time.perf_counter() - begin


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("text", type=Path)
    ask.add_argument("models", nargs="+")
    ask.add_argument("--tokens", type=int, default=32768)
    ask.add_argument("--window", type=int, default=2048)
    ask.add_argument("--reference", action="store_true")
    args = ask.parse_args()
    text = args.text.read_text(encoding="utf-8")
    kinds: dict[str, dict[str, str]] = {"native, bf16 KV": {}, "native, f32 KV": {"kv_format": "f32"}}
    if args.reference:
        kinds = {"float32 reference": {"backend": "torch", "kv_format": "f32"}, **kinds}
    print(f"| model | {' | '.join(kinds)} |\n|---|{'--:|' * len(kinds)}")
    for model in args.models:
        cells, first = [], 0.0
        for options in kinds.values():
            found, seconds = perplexity(model, text, args.tokens, args.window, **options)
            first = first or found
            cells.append(f"{found:.4f} ({100 * (found / first - 1):+.2f} %, {seconds:.0f} s)")
        print(f"| {Path(model).stem} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
