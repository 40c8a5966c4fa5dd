"""Loading is strict: every tensor used once, every weight filled, every shape right, and the file says which is not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from headrace import LLM, ModelFileError
from headrace.loading.names import match_names
from headrace.loading.safetensors import Safetensors
from headrace.models.registry import FAMILIES, family
from headrace.models.rope import LongRope
from headrace.program.backend import Backend
from tests.models.gguf_files import tensors_of, write_gguf
from tests.models.running import BACKENDS, Model, difference, transformers_logits
from tests.models.tiny import VOCAB, tiny_checkpoint

Tensors = dict[str, np.ndarray]
PROMPT = np.random.default_rng(4).integers(0, VOCAB, 40).tolist()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("original")
    return {kind: tiny_checkpoint(folder, kind, num_hidden_layers=2) for kind in ("llama", "qwen2", "qwen3", "phi3")}


def changed(original: Path, folder: Path, change: Callable[[Tensors], None], **config: object) -> Path:
    """A copy of a checkpoint with other tensors or config values."""
    tensors = load_file(original / "model.safetensors")
    change(tensors)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    facts = json.loads((original / "config.json").read_text(encoding="utf-8")) | config
    (folder / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        Model.open(folder)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def without(*patterns: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        gone = [n for n in tensors if any(re.search(p, n) for p in patterns)]
        assert gone
        for name in gone:
            del tensors[name]

    return change


def test_leftovers_are_listed(original: dict[str, Path], tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.weird.weight"] = np.ones(3, np.float32)
        tensors["model.layers.2.mlp.up_proj.weight"] = np.ones((96, 64), np.float32)
        tensors["visual.patch.weight"] = np.ones(3, np.float32)
        tensors["model.layers.0.mlp.gate_proj.bias"] = np.ones(96, np.float32)

    said = refusal(changed(original["llama"], tmp_path, add))
    assert "3 tensors of the file have no place in the model" in said
    for name in ("self_attn.weird.weight", "model.layers.2.mlp.up_proj.weight", "visual.patch.weight"):
        assert name in said
    assert "1 weights that the config asks for are not in the file: layers.1.ffn.gate.bias" in said


def test_missing_ones_are_listed(original: dict[str, Path], tmp_path: Path) -> None:
    said = refusal(changed(original["llama"], tmp_path, without(r"layers\.1\.mlp\.", r"^model\.norm")))
    assert "4 weights" in said
    for name in ("layers.1.ffn.gate.weight", "layers.1.ffn.down.weight", "norm.weight"):
        assert name in said


@pytest.mark.parametrize(
    ("kind", "gone", "said"),
    [
        ("qwen2", r"layers\.1\.self_attn\.k_proj\.bias", "layers.1.attn.k.bias"),
        ("qwen3", r"layers\.0\.self_attn\.q_norm", "layers.0.attn.q_norm.weight"),
        ("qwen3", r"layers\.\d\.self_attn\.k_norm", "layers.0.attn.k_norm.weight, layers.1.attn.k_norm.weight"),
    ],
)
def test_optional_weights_come_in_all_layers_or_in_none(
    kind: str, gone: str, said: str, original: dict[str, Path], tmp_path: Path
) -> None:
    assert said in refusal(changed(original[kind], tmp_path, without(gone)))


def test_a_wrong_shape_names_both(original: dict[str, Path], tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["model.layers.1.self_attn.o_proj.weight"] = np.ones((64, 72), np.float32)

    said = refusal(changed(original["llama"], tmp_path, change))
    assert "model.layers.1.self_attn.o_proj.weight has the shape (64, 72): the config asks for (64, 64)" in said
    said = refusal(changed(original["phi3"], tmp_path, lambda tensors: None, intermediate_size=90))
    assert re.search(r"(gate_up|down)_proj.weight has the shape \(\d+, \d+\): the config asks for \(\d+, \d+\)", said)
    said = refusal(changed(original["llama"], tmp_path, lambda tensors: None, vocab_size=299))
    assert "has the shape (300, 64): the config asks for (299, 64)" in said


def test_no_weight_is_filled_twice(original: dict[str, Path], tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.q_proj.weight"] = np.ones((96, 96), np.float32)

    said = refusal(changed(original["phi3"], tmp_path, add))
    assert "both fill layers.0.attn.q.weight" in said


def test_harmless_buffers_are_known(original: dict[str, Path], tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.rotary_emb.inv_freq"] = np.ones(8, np.float32)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)

    assert Model.open(changed(original["llama"], tmp_path, add))


def test_every_tensor_is_used_exactly_once(original: dict[str, Path]) -> None:
    for kind, folder in original.items():
        source = Safetensors(folder)
        parts = match_names(source, family(source.metadata))
        lines: dict[str, list[int]] = {name: [] for name in source.tensors}
        for part in parts.values():
            lines[part.tensor] += np.arange(source.tensors[part.tensor].shape[0])[part.rows or slice(None)].tolist()
        for name, used in lines.items():
            assert sorted(used) == list(range(source.tensors[name].shape[0])), (kind, name)


# ---- W3


def test_w3_no_head_and_not_tied_is_refused(original: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(original["llama"], tmp_path, without("lm_head"))
    said = refusal(folder)
    assert "head.weight" in said
    assert "tie_word_embeddings" in said
    with pytest.raises(ModelFileError, match="tie_word_embeddings"):
        LLM(folder)


@BACKENDS
def test_w3_no_head_and_tied_is_the_embedding(original: dict[str, Path], backend: Backend, tmp_path: Path) -> None:
    folder = changed(original["llama"], tmp_path, without("lm_head"), tie_word_embeddings=True)
    assert "head.weight" not in Model.open(folder).weights
    assert difference(Model.open(folder).logits(PROMPT, backend=backend), transformers_logits(folder, PROMPT)) < 1e-4


@BACKENDS
def test_w3_a_head_that_is_there_is_used_tied_or_not(
    original: dict[str, Path], backend: Backend, tmp_path: Path
) -> None:
    """transformers ties only where both are equal, and else keeps the file's own: the same logits either way."""
    folder = changed(original["llama"], tmp_path, lambda tensors: None, tie_word_embeddings=True)
    ours = Model.open(folder).logits(PROMPT, backend=backend)
    assert difference(ours, transformers_logits(folder, PROMPT)) < 1e-4
    other = changed(original["llama"], tmp_path / "tied", without("lm_head"), tie_word_embeddings=True)
    assert difference(ours, Model.open(other).logits(PROMPT, backend=backend)) > 0.01


@BACKENDS
def test_w3_a_tied_head_may_stand_for_the_embedding(
    original: dict[str, Path], backend: Backend, tmp_path: Path
) -> None:
    folder = changed(original["llama"], tmp_path, without("embed_tokens"), tie_word_embeddings=True)
    assert difference(Model.open(folder).logits(PROMPT, backend=backend), transformers_logits(folder, PROMPT)) < 1e-4
    said = refusal(changed(original["llama"], tmp_path, without("embed_tokens")))
    assert "embed.weight" in said


# ---- GGUF


def test_gguf_is_as_strict(original: dict[str, Path], tmp_path: Path) -> None:
    folder, file = original["llama"], tmp_path / "model.gguf"
    tensors = tensors_of(folder)
    extra = write_gguf(file, folder, tensors={"blk.0.ffn_gate_inp.weight": np.ones((8, 64), np.float32)})
    assert "blk.0.ffn_gate_inp.weight" in refusal(extra)
    missing: dict[str, np.ndarray] = {"blk.1.ffn_up.weight": None}  # type: ignore[dict-item]
    assert "layers.1.ffn.up.weight" in refusal(write_gguf(file, folder, tensors=missing))
    wrong = {"blk.1.ffn_up.weight": tensors["blk.1.ffn_up.weight"][:90].copy()}
    assert "blk.1.ffn_up.weight has the shape (90, 64)" in refusal(write_gguf(file, folder, tensors=wrong))
    old = {"blk.0.attn_rot_embd.weight": np.ones(8, np.float32)}
    assert Model.open(write_gguf(file, folder, tensors=old))


# ---- configs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported: known are llama, mistral"),
        ({"model_type": None}, "no model_type"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"hidden_size": "64"}, "hidden_size is '64': must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"head_dim": None, "hidden_size": 66}, "66 does not divide among 4"),
        ({"hidden_act": "relu"}, "activation 'relu' is not supported: known are silu, gelu_pytorch_tanh"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\)"),
        ({"rms_norm_eps": True}, "rms_norm_eps is True"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["linear_attention"] * 2}, "linear_att"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"]}, "a list of 2"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "only causal"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 5.0}, "not part of gemma3_text"),
    ],
    ids=lambda v: "" if isinstance(v, str) else ",".join(v),
)
def test_a_config_that_cannot_be_run_is_refused(
    change: dict[str, object], message: str, original: dict[str, Path]
) -> None:
    config = json.loads((original["llama"] / "config.json").read_text(encoding="utf-8"))
    config |= {"max_window_layers": 0} | change
    with pytest.raises(ValueError, match=message):
        family(config)


def test_silent_configs_get_the_families_defaults() -> None:
    base = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    base |= {"vocab_size": 300, "max_position_embeddings": 512}
    specs = {kind: family({**base, "model_type": kind}) for kind in FAMILIES if kind != "gemma3"}
    assert [b.attention.window for b in specs["mistral"].blocks] == [4096, 4096]
    assert family({**base, "model_type": "mistral", "sliding_window": None}).blocks[0].attention.window is None
    assert [b.attention.window for b in specs["gemma2"].blocks] == [4096, None]
    assert (specs["gemma2"].logit_softcap, specs["gemma2"].blocks[0].attention.softcap) == (30.0, 50.0)
    assert family({**base, "model_type": "gemma2", "final_logit_softcapping": None}).logit_softcap is None
    assert {k: s.tied for k, s in specs.items() if s.tied} == {"gemma2": True, "gemma3_text": True}
    assert specs["qwen3"].blocks[0].attention.dim == 128
    assert specs["llama"].blocks[0].attention.kv_heads == 4


def test_qwen_windows_without_layer_types() -> None:
    base = {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    base |= {"num_attention_heads": 4, "vocab_size": 300, "max_position_embeddings": 512, "sliding_window": 40}
    assert [b.attention.window for b in family(base).blocks] == [None] * 3
    base |= {"use_sliding_window": True, "max_window_layers": 1}
    assert [b.attention.window for b in family(base).blocks] == [None, 40, 40]


@pytest.mark.parametrize("word", ["su", "yarn", "longrope"])
def test_old_words_for_the_rotation_of_phi3(word: str) -> None:
    base = {"model_type": "phi3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    base |= {"num_attention_heads": 4, "vocab_size": 300, "max_position_embeddings": 131_072}
    scaling = {"type": word, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope = family({**base, "rope_scaling": scaling}).blocks[0].attention.rope
    assert isinstance(rope.scaling, LongRope)
    assert rope.scaling.trained == 4096
    assert rope.scaling.attention == pytest.approx(1.1902, abs=1e-4), "of Phi-3-mini-128k"


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_wrapper_of_gemma3_runs_where_only_text_is_there(prefix: str, tmp_path: Path) -> None:
    text = tiny_checkpoint(tmp_path, "gemma3_text", num_hidden_layers=2)
    config = json.loads((text / "config.json").read_text(encoding="utf-8"))
    tensors = {prefix + n.removeprefix("model."): t for n, t in load_file(text / "model.safetensors").items()}
    folder = tmp_path / "wrapped"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": config}), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    assert np.array_equal(Model.open(folder).logits(PROMPT), Model.open(text).logits(PROMPT))
    save_file({**tensors, "vision_tower.patch.weight": np.ones(3, np.float32)}, folder / "model.safetensors")
    assert "vision_tower.patch.weight" in refusal(folder)
