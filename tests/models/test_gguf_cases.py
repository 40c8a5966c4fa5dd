"""Cases W3, W5 and W8 where they need a GGUF file: heads of real files, rotation far out, half floats of Gemma."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from headrace.loading.checkpoint import open_checkpoint
from headrace.models.rope import Rope
from headrace.program.decoder import write_program
from tests.models.gguf_files import tensors_of, write_gguf
from tests.models.running import Model, difference, transformers_logits
from tests.models.test_gguf_models import llama3_divisors
from tests.models.test_rope import FAR, POSITIONS, SMALL, VARIANTS
from tests.models.test_rope import PROMPT as FAR_PROMPT
from tests.models.tiny import VOCAB, tiny_checkpoint

TOLERANCE = 1e-4


@pytest.mark.parametrize(
    ("name", "own", "embedding"),
    [("smollm2-135m", None, "Q8_0"), ("gemma3-270m", None, None), ("qwen2.5-coder-0.5b", "Q8_0", "Q5_0")],
)
def test_w3_the_head_of_a_real_file(
    name: str, own: str | None, embedding: str | None, test_model: Callable[[str], Path]
) -> None:
    """Absent it is the embedding; one that is there is used though it has the embedding's shape."""
    checkpoint = open_checkpoint(test_model(name))
    program = write_program(checkpoint.spec, checkpoint.parts, 512)
    [head] = program.head[0].weights
    assert checkpoint.parts["embed.weight"].tensor == "token_embd.weight"
    assert checkpoint.parts[head].tensor == ("token_embd.weight" if own is None else "output.weight")
    formats = {name: info.format for name, info in checkpoint.source.tensors.items()}
    assert formats.get("output.weight") == own
    assert embedding in (None, formats["token_embd.weight"])
    checkpoint.source.close()


def test_w5_the_header_of_gemma3_270m(test_model: Callable[[str], Path]) -> None:
    """It says base 1e6 and window 512, and neither a local base nor which layers are global."""
    checkpoint = open_checkpoint(test_model("gemma3-270m"))
    assert not [k for k in checkpoint.source.metadata if "swa" in k or "pattern" in k]
    kinds = [(b.attention.window, b.attention.rope.theta) for b in checkpoint.spec.blocks]
    assert kinds == ([(512, 10_000.0)] * 5 + [(None, 1_000_000.0)]) * 3
    assert {b.attention.rope.scaling for b in checkpoint.spec.blocks} == {None}
    checkpoint.source.close()


@pytest.mark.parametrize("variant", ["linear", "llama3", "yarn"])
def test_w5_logits_of_a_gguf_far_out(variant: str, tmp_path: Path) -> None:
    parameters = {**VARIANTS[variant], "rope_theta": 10_000.0}
    folder = tiny_checkpoint(tmp_path, "llama", **SMALL, rope_parameters=parameters)
    facts: dict[str, Any] = {}
    tensors: dict[str, np.ndarray] = {}
    if variant == "llama3":
        tensors["rope_freqs.weight"] = llama3_divisors(parameters, 32)
    else:
        facts = {".rope.scaling.type": variant, ".rope.scaling.factor": 8.0}
    if variant == "yarn":
        facts[".rope.scaling.original_context_length"] = 1024
    model = Model.open(write_gguf(tmp_path / "model.gguf", folder, facts=facts, tensors=tensors))
    theirs = transformers_logits(folder, FAR_PROMPT, attention="sdpa")[POSITIONS]
    ours = model.logits(FAR_PROMPT, chunks=[5003], context=FAR, wanted=POSITIONS)
    for position, a, b in zip(POSITIONS, ours, theirs, strict=True):
        assert difference(a, b) < TOLERANCE, position
    plain = replace(model.spec.blocks[0].attention, rope=Rope(10_000.0, 32))
    spec = replace(model.spec, blocks=(replace(model.spec.blocks[0], attention=plain),))
    assert difference(model.logits(FAR_PROMPT, chunks=[5003], wanted=[9000], spec=spec)[0], theirs[2]) > 0.01


def test_w8_half_floats_of_gemma_in_a_gguf(tmp_path: Path) -> None:
    """An embedding that is 3e5 after Gemma's scaling, from F16: nothing on the way is held in half floats."""
    prompt = np.random.default_rng(6).integers(0, VOCAB, 60).tolist()
    folder = tiny_checkpoint(tmp_path, "gemma3_text", dtype="float16", query_pre_attn_scalar=32)
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"].copy()
    embedding[prompt[7], 3] = 3e5 / 8
    save_file({**weights, "model.embed_tokens.weight": embedding}, folder / "model.safetensors", {"format": "pt"})
    halves = {name: w.astype(np.float16) for name, w in tensors_of(folder).items() if w.ndim == 2}
    model = Model.open(write_gguf(tmp_path / "model.gguf", folder, tensors=halves))
    assert {w.name for w in model.weights.values()} == {"F16", "F32"}
    theirs = transformers_logits(folder, prompt)
    assert np.abs(theirs).max() > 1e5, "the outlier must reach the logits"
    for kv_format, close in (("f32", TOLERANCE), ("bf16", 2e-2)):
        ours = model.logits(prompt, kv_format=kv_format)
        assert np.isfinite(ours).all()
        assert difference(ours, theirs) < close
