"""A real GGUF file against transformers on the same dequantized weights, teacher-forced, position by position (W2).

The other files are compared with golden ids and margins: tests/golden.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers

from headrace.loading.checkpoint import load_weights, open_checkpoint
from tests.models.running import Model

TEXT = (
    "The river turns the wheel, and the wheel turns the stone. def grind(grain: list[int]) -> int:\n"
    '    """Sum of all grains."""\n    return sum(grain)\n'
    "水车转动石磨。 Die Mühle am Bach klappert bei Tag und bei Nacht; 1, 2, 3, 5, 8, 13, 21 … 🙂 "
    "In 1847 the mill was sold for 3,250 pounds to a man who had never seen it, and who never would."
)


def test_logits_of_a_real_file(smollm2: Path) -> None:
    checkpoint = open_checkpoint(smollm2)
    tokens = checkpoint.tokenizer.encode(TEXT)[:100]
    assert len(tokens) >= 90
    ours = Model(checkpoint.spec, load_weights(checkpoint)).logits(tokens, chunks=[33], context=512)
    theirs = _transformers(smollm2, tokens)
    assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()
    assert (ours.argmax(1) == theirs.argmax(1)).mean() > 0.97


@torch.inference_mode()
def _transformers(path: Path, tokens: list[int]) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    logits: np.ndarray = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    return logits
