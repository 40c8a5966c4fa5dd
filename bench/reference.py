"""The reference backend beside transformers: the same GGUF file in float32, greedy, one stream, the same threads.

    python bench/reference.py FILE.gguf [--tokens 64] [--repeat 3]

Needs the `test` extra. Medians of tokens per second after the first token, alternating; Markdown on standard output.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from headrace import LLM, SamplingParams

PROMPT = "The mill stood where the river bent twice. In spring the water came down brown and loud, and"


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("file", type=Path)
    ask.add_argument("--tokens", type=int, default=64)
    ask.add_argument("--repeat", type=int, default=3)
    args = ask.parse_args()
    with LLM(args.file, context=1024) as llm:
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(args.file.parent, gguf_file=args.file.name, dtype=torch.float32)
        ids = llm.tokenizer.encode(PROMPT)

        def ours() -> float:
            params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
            timings = llm.generate(ids, params)[0].outputs[0].timings
            assert timings is not None
            return (args.tokens - 1) / (timings.total_s - timings.first_token_s)

        def theirs() -> float:
            prompt = torch.tensor([ids])
            marks = []
            for count in (1, args.tokens):
                begin = time.perf_counter()
                model.generate(prompt, do_sample=False, max_new_tokens=count, min_new_tokens=count, eos_token_id=None)
                marks.append(time.perf_counter() - begin)
            return (args.tokens - 1) / (marks[1] - marks[0])

        pairs = [(ours(), theirs()) for _ in range(args.repeat)]
    mine, peer = (statistics.median(column) for column in zip(*pairs, strict=True))
    print("| | Headrace, tok/s | transformers, tok/s | ratio |\n|---|--:|--:|--:|")
    print(f"| {args.file.stem} | {mine:.1f} | {peer:.1f} | {mine / peer:.2f} |")


if __name__ == "__main__":
    main()
