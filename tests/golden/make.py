"""Write the golden files: what transformers makes of a GGUF file in float32, greedily, for sixteen prompts.

    python tests/golden/make.py FILE.gguf [FILE.gguf ...]

Needs transformers, gguf, torch and accelerate (the `test` extra). Each file takes minutes and four bytes of memory per
parameter. One JSON per model is written beside this script: for each prompt its ids, the 64 generated ids and for each
generated position the five largest logits, so that a near-tie can be told from a fault.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from prompts import CHATS, TEXTS
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
GENERATED = 64
TOP = 5


def load(file: Path) -> tuple[Any, Any]:
    """transformers' tokenizer and float32 model of a GGUF file, the head checked against the file's own."""
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tensors = {t.name: t for t in gguf.GGUFReader(file).tensors}
    head = tensors.get("output.weight", tensors["token_embd.weight"])
    own = gguf.quants.dequantize(head.data[:64], head.tensor_type)
    assert np.array_equal(own, model.lm_head.weight[:64].detach().numpy()), "transformers took another head"
    return tokenizer, model


def prompt_ids(tokenizer: Any) -> dict[str, list[int]]:
    """Every prompt that this model can take; chats only where there is a template."""
    ids = {name: tokenizer(text)["input_ids"] for name, text in TEXTS.items()}
    for name, messages in CHATS.items():
        if tokenizer.chat_template:
            ids[name] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        else:
            ids[name] = tokenizer("\n".join(m["content"] for m in messages))["input_ids"]
    return ids


@torch.inference_mode()
def greedy(model: Any, prompt: list[int]) -> tuple[list[int], list[list[int]], list[list[float]]]:
    """(generated ids, ids of the five largest logits, those logits), position by position; ends are not honoured."""
    out, top_ids, top_logits, cache = [], [], [], None
    step = torch.tensor([prompt])
    for _ in range(GENERATED):
        result = model(step, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = result.past_key_values
        best = result.logits[0, -1].topk(TOP)
        out.append(int(best.indices[0]))
        top_ids.append(best.indices.tolist())
        top_logits.append([float(f"{x:.6g}") for x in best.values.tolist()])
        step = torch.tensor([[out[-1]]])
    return out, top_ids, top_logits


def main() -> None:
    versions = {p: importlib.metadata.version(p) for p in ("torch", "transformers", "tokenizers", "gguf")}
    for file in map(Path, sys.argv[1:]):
        tokenizer, model = load(file)
        entries = []
        for name, ids in prompt_ids(tokenizer).items():
            generated, top_ids, top_logits = greedy(model, ids)
            entries.append(
                {"name": name, "prompt": ids, "generated": generated, "top_ids": top_ids, "top_logits": top_logits}
            )
            print(f"{file.stem}: {name}: {len(ids)} + {GENERATED}: {tokenizer.decode(generated)!r}", flush=True)
        out = HERE / f"{file.stem}.json"
        lines = ",\n".join(json.dumps(e, ensure_ascii=False) for e in entries)
        out.write_text(f'{{"versions": {json.dumps(versions)},\n"entries": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
