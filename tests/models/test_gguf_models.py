"""The same tiny model from GGUF and from safetensors gives the same logits (W1, W3, W5)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.loading.configs import gguf_config
from headrace.loading.gguf import GGUF
from headrace.models.registry import family
from headrace.program.backend import Backend
from tests.models.gguf_files import permuted, tensors_of, write_gguf
from tests.models.running import BACKENDS, Model, difference, transformers_logits
from tests.models.tiny import VOCAB, tiny_checkpoint

TOLERANCE = 1e-4
PROMPT = np.random.default_rng(2).integers(0, VOCAB, 110).tolist()

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


HEADS_OF_16: dict[str, dict[str, Any]] = {"mistral": {"head_dim": 32}, "phi3": {"hidden_size": 64}}
"""What native kernels take of families whose tiny model has heads of 24 channels."""


@BACKENDS
@pytest.mark.parametrize(
    ("kind", "overrides", "facts"),
    [
        ("llama", {"attention_bias": True}, {}),
        ("mistral", {}, {}),
        ("qwen2", {"use_sliding_window": False}, {}),
        ("qwen3", {}, {}),
        ("gemma2", {}, {".attention.scale": 24**-0.5}),
        ("gemma3_text", {"query_pre_attn_scalar": 32}, {}),
        ("phi3", {}, {}),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_gguf_equals_safetensors(
    kind: str, overrides: dict[str, Any], facts: dict[str, Any], backend: Backend, tmp_path: Path
) -> None:
    if backend.name == "native":
        overrides = overrides | HEADS_OF_16.get(kind, {})
    folder = tiny_checkpoint(tmp_path, kind, **overrides)
    file = write_gguf(tmp_path / "model.gguf", folder, facts=facts)
    theirs = transformers_logits(folder, PROMPT)
    assert difference(Model.open(folder).logits(PROMPT, backend=backend), theirs) < TOLERANCE
    assert difference(Model.open(file).logits(PROMPT, backend=backend), theirs) < TOLERANCE


@BACKENDS
@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text"])
def test_w1_the_first_layer_of_gemma(kind: str, backend: Backend, tmp_path: Path) -> None:
    """What comes out of it, through the final norm and the head."""
    folder = tiny_checkpoint(tmp_path, kind, query_pre_attn_scalar=32)
    theirs = transformers_logits(folder, PROMPT, layers=1)
    assert difference(transformers_logits(folder, PROMPT), theirs) > 0.1
    for path in (folder, write_gguf(tmp_path / "model.gguf", folder)):
        model = Model.open(path)
        first = replace(model.spec, blocks=model.spec.blocks[:1])
        assert difference(model.logits(PROMPT, spec=first, backend=backend), theirs) < TOLERANCE


@BACKENDS
def test_w1_each_norm_of_gemma_counts_once(backend: Backend, tmp_path: Path) -> None:
    """The GGUF's norms have their 1 already; one norm with it missing or twice moves the logits."""
    folder = tiny_checkpoint(tmp_path, "gemma3_text", query_pre_attn_scalar=32)
    theirs = transformers_logits(folder, PROMPT)
    norms = [name for name in tensors_of(folder) if name.startswith(("blk.0.", "output")) and "norm" in name]
    assert len(norms) == 7
    for name in norms:
        for by in (-1, 1):
            file = write_gguf(tmp_path / "one.gguf", folder, tensors={name: tensors_of(folder)[name] + np.float32(by)})
            assert difference(Model.open(file).logits(PROMPT, backend=backend), theirs) > 10 * TOLERANCE, (name, by)


def test_a_llama_that_was_not_permuted_is_seen(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    keys = {n: permuted(w, 2) for n, w in tensors_of(folder).items() if "attn_k" in n}
    file = write_gguf(tmp_path / "model.gguf", folder, tensors=keys)
    assert difference(Model.open(file).logits(PROMPT), transformers_logits(folder, PROMPT)) > 100 * TOLERANCE


@BACKENDS
@pytest.mark.parametrize("tied", [True, False])
def test_w3_the_head_is_the_files_own_or_the_embedding(tied: bool, backend: Backend, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama", tie_word_embeddings=tied)
    file = write_gguf(tmp_path / "model.gguf", folder)
    assert ("output.weight" in GGUF(file).tensors) is not tied
    ours = Model.open(file).logits(PROMPT, backend=backend)
    assert difference(ours, transformers_logits(folder, PROMPT)) < TOLERANCE


def llama3_divisors(parameters: dict[str, Any], dim: int) -> np.ndarray:
    """rope_freqs as llama.cpp's converter computes it."""
    out = []
    trained, low, high = (
        parameters[k] for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * parameters["rope_theta"] ** (i / dim)
        if wavelength < trained / high:
            out.append(1.0)
        elif wavelength > trained / low:
            out.append(parameters["factor"])
        else:
            smooth = (trained / wavelength - low) / (high - low)
            out.append(1 / ((1 - smooth) / parameters["factor"] + smooth))
    return np.array(out, np.float32)


def test_w5_rope_freqs_are_llama3(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama", rope_parameters=LLAMA3)
    divisors = llama3_divisors(LLAMA3, 16)
    assert len(set(divisors)) > 3, "the smooth part must be met"
    file = write_gguf(tmp_path / "model.gguf", folder, tensors={"rope_freqs.weight": divisors})
    theirs = transformers_logits(folder, PROMPT)
    assert difference(Model.open(file).logits(PROMPT), theirs) < TOLERANCE
    without = write_gguf(tmp_path / "without.gguf", folder)
    assert difference(Model.open(without).logits(PROMPT), theirs) > 100 * TOLERANCE


@pytest.mark.parametrize("trained", [64, 256], ids=["long", "short"])
def test_w5_rope_factors_of_phi3(trained: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    short, long = (np.sort(rng.uniform(1, 9, 9)).astype(np.float32) for _ in range(2))
    folder = tiny_checkpoint(
        tmp_path,
        "phi3",
        original_max_position_embeddings=trained,
        partial_rotary_factor=0.75,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": short.tolist(),
            "long_factor": long.tolist(),
        },
    )
    file = write_gguf(
        tmp_path / "model.gguf",
        folder,
        facts={
            ".rope.scaling.original_context_length": trained,
            ".rope.scaling.attn_factor": math.sqrt(1 + math.log(512 / trained) / math.log(trained)),
        },
        tensors={"rope_factors_long.weight": long, "rope_factors_short.weight": short},
    )
    theirs = transformers_logits(folder, PROMPT)
    for path in (folder, file):
        assert difference(Model.open(path).logits(PROMPT, context=110), theirs) < TOLERANCE


@pytest.mark.parametrize(
    ("rope", "facts"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {".rope.scaling.type": "linear", ".rope.scaling.factor": 4.0}),
        ({"rope_type": "linear", "factor": 4.0}, {".rope.scale_linear": 4.0}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            {
                ".rope.scaling.type": "yarn",
                ".rope.scaling.factor": 4.0,
                ".rope.scaling.original_context_length": 32,
            },
        ),
    ],
    ids=["linear", "old linear", "yarn"],
)
def test_w5_scaling_keys(rope: dict[str, Any], facts: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "qwen3", rope_parameters={"rope_theta": 10_000.0, **rope})
    file = write_gguf(tmp_path / "model.gguf", folder, facts=facts)
    theirs = transformers_logits(folder, PROMPT)
    assert difference(Model.open(file).logits(PROMPT), theirs) < TOLERANCE
    plain = write_gguf(tmp_path / "plain.gguf", folder)
    assert difference(Model.open(plain).logits(PROMPT), theirs) > 100 * TOLERANCE


def test_w5_gemma3_stretches_global_layers_only(tmp_path: Path) -> None:
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    folder = tiny_checkpoint(tmp_path, "gemma3_text", query_pre_attn_scalar=32, rope_parameters=rope)
    facts = {".rope.scaling.type": "linear", ".rope.scaling.factor": 8.0, ".rope.freq_base": None}
    file = write_gguf(tmp_path / "model.gguf", folder, facts=facts)
    assert difference(Model.open(file).logits(PROMPT), transformers_logits(folder, PROMPT)) < TOLERANCE


def test_partial_rotation_of_a_llama_keeps_the_files_pairs(tmp_path: Path) -> None:
    """A GGUF llama that turns fewer channels than a head has turns the first pairs of neighbours, as llama.cpp does."""
    folder = tiny_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    file = write_gguf(tmp_path / "model.gguf", folder, facts={".rope.dimension_count": 8})
    model, whole = Model.open(file), Model.open(folder)
    assert model.spec.blocks[0].attention.rope.dim == 8
    q, original = model.weights["layers.0.attn.q.weight"].dense(), whole.weights["layers.0.attn.q.weight"].dense()
    # Of 16 channels the pairs (i, i + 8) for i < 4 turn: they come first, as two halves of four.
    turning = [0, 1, 2, 3, 8, 9, 10, 11]
    assert np.array_equal(q[:8], original[turning])
    rest = [4, 12, 5, 13, 6, 14, 7, 15]
    assert np.array_equal(q[8:16], original[rest])


def config_of(folder: Path, path: Path, **facts: Any) -> dict[str, Any]:
    return gguf_config(GGUF(write_gguf(path, folder, facts={f".{k.replace('__', '.')}": v for k, v in facts.items()})))


def test_defaults_where_the_file_is_silent(tmp_path: Path) -> None:
    gemma = tiny_checkpoint(tmp_path, "gemma3_text")
    spec = family(config_of(gemma, tmp_path / "a.gguf", rope__freq_base=None))
    assert [b.attention.window for b in spec.blocks] == [48] * 5 + [None, 48]
    assert [b.attention.rope.theta for b in spec.blocks] == [1e4] * 5 + [1e6, 1e4]
    listed = config_of(gemma, tmp_path / "b.gguf", attention__sliding_window_pattern=[True, False] * 3 + [True])
    assert [b.attention.window for b in family(listed).blocks] == [48, None] * 3 + [48]
    without = family(config_of(gemma, tmp_path / "c.gguf", attention__sliding_window=None))
    assert {b.attention.window for b in without.blocks} == {None}
    second = tiny_checkpoint(tmp_path, "gemma2")
    silent = {"attention__sliding_window": None, "attn_logit_softcapping": None, "final_logit_softcapping": None}
    spec = family(config_of(second, tmp_path / "d.gguf", **silent))
    assert [b.attention.window for b in spec.blocks] == [4096, None, 4096]
    assert (spec.blocks[0].attention.softcap, spec.logit_softcap) == (50.0, 30.0)
    assert spec.blocks[0].attention.scale == 32**-0.5
    llama = tiny_checkpoint(tmp_path, "llama")
    silent = {"rope__freq_base": None, "attention__key_length": None, "attention__value_length": None}
    spec = family(config_of(llama, tmp_path / "e.gguf", **silent, attention__head_count_kv=[2, 2, 2]))
    assert spec.blocks[0].attention.rope.theta == 10_000.0
    assert (spec.blocks[0].attention.dim, spec.blocks[0].attention.kv_heads) == (16, 2)
    assert family(config_of(llama, tmp_path / "f.gguf", attention__sliding_window=100)).family == "mistral"


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"block_count": None}, "no llama.block_count"),
        ({"attention__layer_norm_rms_epsilon": None}, "no llama.attention.layer_norm_rms_epsilon"),
        ({"expert_count": 8}, "llama.expert_count is 8: not supported"),
        ({"attention__value_length": 32}, "value_length differs"),
        ({"attention__head_count_kv": [2, 1, 2]}, "head_count_kv differs from layer to layer"),
        ({"rope__scaling__type": "weird"}, "rope.scaling.type 'weird' is not supported"),
        ({"rope__scaling__type": "longrope"}, "rope_factors_long"),
        ({"rope__scaling__attn_factor": 1.5}, "attn_factor 1.5"),
        ({"rope__scaling__yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5"),
        ({"logit_scale": 0.5}, "logit_scale is 0.5"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_cannot_be_run_is_refused_by_name(facts: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        config_of(folder, tmp_path / "model.gguf", **facts)
