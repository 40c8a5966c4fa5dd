"""How often greedy answers of the native backend are those of the float32 reference: 16 prompts of 64 tokens a model.

    python bench/agreement.py MODEL.gguf [MODEL.gguf ...] [--kv-format bf16]

The reference is transformers in float32 on the same weights: tests/golden. `free`: answers that are equal to their last
token, and the tokens before the first difference on average. One difference makes all that follows another text, so
`forced` counts what matters more: of all positions after the reference's own tokens, where the first choice is the
same, and how clearly the reference preferred its choice where it is not (the difference of its two largest logits, the
median and the largest). Markdown on standard output.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from headrace import LLM, SamplingParams

GOLDEN = Path(__file__).parents[1] / "tests/golden"


def row(model: Path, kv_format: str) -> str:
    entries = json.loads((GOLDEN / f"{model.stem}.json").read_text(encoding="utf-8"))["entries"]
    free = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    forced = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    before, margins, positions = [], [], 0
    with LLM(model, context=2048, kv_format=kv_format) as llm:
        for entry, output in zip(entries, llm.generate([e["prompt"] for e in entries], free), strict=True):
            same = [a == b for a, b in zip(output.outputs[0].token_ids, entry["generated"], strict=True)]
            before.append(same.index(False) if False in same else len(same))
        for entry, output in zip(
            entries, llm.generate([e["prompt"] + e["generated"] for e in entries], forced), strict=True
        ):
            assert output.prompt_logprobs is not None
            for at, told in enumerate(output.prompt_logprobs[len(entry["prompt"]) :]):
                assert told is not None
                positions += 1
                if told[entry["generated"][at]].rank != 1:
                    first, second = entry["top_logits"][at][:2]
                    margins.append(first - second)
    whole = sum(count == 64 for count in before)
    off = f"{statistics.median(margins):.2f}, {max(margins):.2f}" if margins else "none"
    share = 100 * (1 - len(margins) / positions)
    return f"| {model.stem} | {whole} of {len(entries)} | {statistics.mean(before):.0f} | {share:.1f} % | {off} |"


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("models", nargs="+", type=Path)
    ask.add_argument("--kv-format", default="bf16")
    args = ask.parse_args()
    print("| model | free: equal | tokens before a difference | forced: same choice | margin where not |")
    print("|---|--:|--:|--:|--:|")
    for model in args.models:
        print(row(model, args.kv_format), flush=True)


if __name__ == "__main__":
    main()
