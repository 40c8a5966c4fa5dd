"""What a grammar costs: tokens per second with one beside the same work without, many streams at once.

    python bench/constrained.py MODEL [MODEL ...] [--streams 16] [--answer 128] [--repeat 3]

Every stream answers `answer` tokens at temperature 1: free; as a JSON document of a schema with strings, numbers, an
enum and a list; and by a regular expression of letters. Documents are drawn so long that `answer` tokens cut them.
Then the same with every stream by a schema of its own. Grammars are compiled before the clock starts; what that took is
told (the first one brings the tokenizer along). Medians of the repeats, which take turns; Markdown on standard output.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from headrace import LLM, Grammar, SamplingParams


def schema(number: int) -> Grammar:
    """A list of records that goes on beyond any answer."""
    record: dict[str, Any] = {
        "type": "object",
        "properties": {
            f"name{number}": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "kind": {"enum": ["red", "green", "blue"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
        },
        "required": [f"name{number}", "age", "kind", "tags"],
        "additionalProperties": False,
    }
    return Grammar("json", json.dumps({"type": "array", "items": record, "minItems": 500}))


def ways(streams: int) -> dict[str, list[Grammar | None]]:
    return {
        "free": [None] * streams,
        "one schema": [schema(0)] * streams,
        "a schema each": [schema(number) for number in range(streams)],
        "a regular expression": [Grammar("regex", "[a-zA-Z ,.]{2000,}")] * streams,
    }


def measured(llm: LLM, grammars: list[Grammar | None], answer: int) -> tuple[float, float]:
    """Seconds to compile, tokens per second."""
    prompts = [[1000 + number, *range(2000, 2031)] for number in range(len(grammars))]
    params = [
        SamplingParams(temperature=1, seed=number, max_tokens=answer, ignore_eos=True, grammar=grammar)
        for number, grammar in enumerate(grammars)
    ]
    begin = time.perf_counter()
    held = [llm.model.compiled(one) for one in params]
    compiled = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - compiled
    del held
    assert all(len(output.outputs[0].token_ids) == answer for output in outputs)
    return compiled - begin, answer * len(grammars) / seconds


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("models", nargs="+")
    for name, default in (("streams", 16), ("answer", 128), ("repeat", 3)):
        ask.add_argument(f"--{name}", type=int, default=default)
    args = ask.parse_args()
    print("| model | | first compiled in, ms | tok/s | of free |\n|---|---|--:|--:|--:|")
    for model in args.models:
        with LLM(model, context=1024, rows=args.streams, past_load=False) as llm:
            runs: dict[str, list[tuple[float, float]]] = {way: [] for way in ways(args.streams)}
            for _ in range(args.repeat):
                for way, grammars in ways(args.streams).items():
                    runs[way].append(measured(llm, grammars, args.answer))
        free = statistics.median(speed for _, speed in runs["free"])
        for way, found in runs.items():
            speed = statistics.median(speed for _, speed in found)
            first = f"{1000 * found[0][0]:.0f}" if way != "free" else ""
            print(f"| {Path(model).stem} | {way} | {first} | {speed:,.0f} | {speed / free:.2f} |", flush=True)


if __name__ == "__main__":
    main()
