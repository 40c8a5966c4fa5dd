"""Write the golden ids: what transformers makes of the texts of corpus.py with the tokenizers of GGUF files.

    PYTHONPATH=. python tests/tokenize/make_golden.py FILE.gguf [FILE.gguf ...]

Needs transformers (the `test` extra). One JSON per vocabulary is written beside this script: for each text the ids with
control tokens parsed, for those texts where it makes a difference also the ids with split_special_tokens, and a digest
of the ids of the large text.

transformers 5.24 cuts SmolLM2's text as GPT-2 does, although the file asks for `smollm` (each digit alone). Then white
space before a digit is cut otherwise than by the model's own tokenizer.json and by llama.cpp. Where that shows, the ids
with the digits cut off first are written as "own"; llama.cpp (its server's /tokenize, October 2026) gives the same.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from tests.tokenize.corpus import TEXTS, large

NAMES = ("smollm2", "gemma3", "qwen2.5-coder")


def digest(ids: list[int]) -> dict[str, Any]:
    return {"count": len(ids), "sha256": hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()}


def ids_of(tokenizer: Any, **how: Any) -> list[list[int]]:
    return [tokenizer(text, **how)["input_ids"] for text in TEXTS]


def golden(tokenizer: Any, *, digits_alone: bool) -> dict[str, Any]:
    parsed = ids_of(tokenizer)
    if digits_alone:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    own, literal = ids_of(tokenizer), ids_of(tokenizer, split_special_tokens=True)
    return {
        "parsed": parsed,
        "own": {i: ids for i, ids in enumerate(own) if ids != parsed[i]},
        "literal": {i: ids for i, ids in enumerate(literal) if ids != own[i]},
        "large": digest(tokenizer(large())["input_ids"]),
    }


def main() -> None:
    versions = {p: importlib.metadata.version(p) for p in ("transformers", "tokenizers")}
    for file in map(Path, sys.argv[1:]):
        name = next(name for name in NAMES if file.name.lower().startswith(name))
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        found = {"versions": versions, **golden(tokenizer, digits_alone=name == "smollm2")}
        out = Path(__file__).parent / "golden" / f"{name}.json"
        text = json.dumps(found, separators=(",", ":")) + "\n"
        if out.exists() and out.read_text() != text:
            print(f"{out.name} was different")
        out.parent.mkdir(exist_ok=True)
        out.write_text(text)
        print(f"{file.name}: {out.stat().st_size:,} bytes, {len(found['own'])} texts cut otherwise by transformers")


if __name__ == "__main__":
    main()
