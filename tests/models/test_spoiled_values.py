"""Any value of a config or of GGUF metadata may be nonsense: a model opens, or is refused by path, and soon (W7)."""

from __future__ import annotations

import json
import re
import shutil
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from headrace.config import Options
from headrace.engine.build import plan_engine
from headrace.errors import ModelFileError, OptionError
from headrace.loading.checkpoint import open_checkpoint
from headrace.models.facts import MOST
from tests.models.gguf_files import write_gguf
from tests.models.tiny import save_tokenizer, tiny_checkpoint

FAMILIES = ("llama", "qwen2", "gemma2", "gemma3_text", "phi3")

NONSENSE: tuple[Any, ...] = (
    *(None, True, False, "", "4", "yarn", "full_attention"),
    *(0, 1, 2, 3, -1, 7, 1 << 31, 1 << 62, -(1 << 62), 1 << 64, 10**400),
    *(0.0, -0.0, 0.5, 1.5, -2.5, 1e-300, 1e-40, 1e30, 1e308, float("nan"), float("inf"), float("-inf")),
    *([], [1], [[1], [2]], [True, "x", None], [1.5] * 9, [10**400], {}, {"factor": 0}, {"full_attention": [[]]}),
)
ROPES = ("linear", "dynamic", "llama3", "yarn", "longrope")
SCALING: dict[str, Any] = {
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "attention_factor": 1.0,
    "truncate": True,
    "partial_rotary_factor": 1.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}
SUGGESTED = ("general.sampling.temp", "general.sampling.top_k", "tokenizer.ggml.eos_token_id")
GGUF_KEYS = (
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"),
    *("attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length", "attention.value_length"),
    *("attention.scale", "attention.sliding_window", "attention.sliding_window_pattern", "attention.causal"),
    *("attention.clamp_kqv", "attn_logit_softcapping", "final_logit_softcapping", "expert_count", "logit_scale"),
    *("rope.freq_base", "rope.freq_base_swa", "rope.dimension_count", "rope.scale_linear", "rope.scaling.factor"),
    *("rope.scaling.type", "rope.scaling.original_context_length", "rope.scaling.attn_factor"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("originals")
    return {kind: tiny_checkpoint(folder, kind, num_hidden_layers=2) for kind in FAMILIES}


REFERENCE = Options.of(backend="torch")
"""The reference runs heads of any size; these are of 2 channels."""


def opened(path: Path) -> bool:
    """Whether the model opens and its engine can be planned; nothing but ModelFileError says that it does not, or, of
    a context larger than memory, OptionError which option would do."""
    start = time.process_time()
    try:
        plan_engine(path, REFERENCE).checkpoint.source.close()
        said = None
    except ModelFileError as error:
        said = str(error)
    except OptionError as error:
        said = f"{path}: {error}" if "one request of the context" in str(error) else ""
    assert time.process_time() - start < 1
    assert said is None or (str(path) in said and len(said) < 2000)
    return said is None


def put(config: dict[str, Any], place: tuple[str, ...], value: Any) -> None:
    *within, key = place
    for name in within:
        config = config.setdefault(name, {})
        if not isinstance(config, dict):
            return
    config[key] = value


def places(config: dict[str, Any]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for key, value in config.items():
        found.append((key,))
        if isinstance(value, dict):
            found += [(key, *below) for below in places(value)]
    return found


@pytest.mark.parametrize("kind", FAMILIES)
def test_spoiled_configs(kind: str, originals: dict[str, Path]) -> None:
    folder = originals[kind]
    text = (folder / "config.json").read_text(encoding="utf-8")
    random = np.random.default_rng(FAMILIES.index(kind))
    good = 0
    for _ in range(200):
        config = json.loads(text)
        if random.random() < 0.5:
            parameters = {**SCALING, "rope_type": str(random.choice(ROPES))}
            config["rope_parameters"] = {"full_attention": parameters} if kind == "gemma3_text" else parameters
        keys = [*places(config), ("rope_scaling",), ("head_dim",), ("text_config",), ("query_pre_attn_scalar",)]
        for _ in range(int(random.integers(1, 3))):
            put(config, keys[random.integers(len(keys))], NONSENSE[random.integers(len(NONSENSE))])
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        good += opened(folder)
    (folder / "config.json").write_text(text, encoding="utf-8")
    assert 20 < good < 180, "both ends must be met"


def writable(value: Any) -> Any:
    """A value as GGUF can say it; the tests' converter writes numbers as integers and float32, lists as they are."""
    if isinstance(value, int) and not isinstance(value, bool):
        return min(value, (1 << 64) - 1)
    if isinstance(value, float):
        return float(np.float32(value)) if abs(value) < 3e38 else value if np.isinf(value) or np.isnan(value) else 3e38
    if isinstance(value, dict) or value in ([], [10**400], [True, "x", None]):
        return ["a", "b"]
    return value


@pytest.mark.parametrize("kind", FAMILIES)
def test_spoiled_metadata(kind: str, originals: dict[str, Path], tmp_path: Path) -> None:
    random = np.random.default_rng(FAMILIES.index(kind))
    good = 0
    for _ in range(100):
        facts: dict[str, Any] = {}
        if random.random() < 0.5:
            facts = {".rope.scaling.type": str(random.choice(["linear", "yarn"])), ".rope.scaling.factor": 4.0}
        for _ in range(int(random.integers(1, 3))):
            key = str(random.choice([*SUGGESTED[:2], *(f".{key}" for key in GGUF_KEYS)]))
            facts[key] = writable(NONSENSE[random.integers(len(NONSENSE))])
        more = {"rope_freqs.weight": np.ones(8, np.float32)} if random.random() < 0.2 else {}
        good += opened(write_gguf(tmp_path / "spoiled.gguf", originals[kind], facts=facts, tensors=more))
    assert 5 < good < 95, "both ends must be met"


# ---- one by one


def config_changed(folder: Path, **values: Any) -> Path:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | values), encoding="utf-8")
    return folder


def refusal(path: Path) -> str:
    """The error's text, behind the path. It comes within a second and takes under 64 MB."""
    start = time.process_time()
    with pytest.raises(ModelFileError):
        plan_engine(path, Options())
    assert time.process_time() - start < 1
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError) as caught:
            plan_engine(path, Options())
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value).removeprefix(f"{path}: ")


@pytest.fixture
def folder(originals: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals["llama"], tmp_path / "copy"))


@pytest.mark.parametrize("layers", [100_000, 1 << 62, 10**400], ids=["100000", "2^62", "10^400"])
@pytest.mark.parametrize("kind", [*FAMILIES, "gemma3"])
def test_a_model_has_no_more_layers_than_its_tensors_make(
    kind: str, layers: int, originals: dict[str, Path], tmp_path: Path
) -> None:
    own: dict[str, Any] = {"num_hidden_layers": layers, "layer_types": None}
    copy = Path(shutil.copytree(originals["gemma3_text" if kind == "gemma3" else kind], tmp_path / "copy"))
    if kind == "gemma3":
        config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
        own = {"model_type": "gemma3", "num_hidden_layers": None, "text_config": config | own}
    said = refusal(config_changed(copy, **own))
    assert re.match(r"the config's num_hidden_layers is [\d.]+, but \d+ tensors make \d layers at most", said)


@pytest.mark.parametrize("layers", [100_000, 1 << 62])
@pytest.mark.parametrize("kind", FAMILIES)
def test_nor_has_one_in_gguf(kind: str, layers: int, originals: dict[str, Path], tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", originals[kind], facts={".block_count": layers})
    assert re.match(r"\w+\.block_count is \d+, but \d+ tensors make \d layers at most", refusal(file))


def test_many_layers_are_matched_in_a_time_that_grows_with_their_number(folder: Path) -> None:
    """As many layers as a model may have, most weights missing: names of weights are looked up, not searched."""
    tensors = load_file(folder / "model.safetensors")
    more = {f"model.layers.{i}.input_layernorm.weight": np.ones(64, np.float32) for i in range(12_000)}
    save_file(tensors | more, folder / "model.safetensors")
    assert "num_hidden_layers is 1025: must be at most 1024" in refusal(config_changed(folder, num_hidden_layers=1025))
    said = refusal(config_changed(folder, num_hidden_layers=1024))
    assert "weights that the config asks for are not in the file" in said


def test_the_deepest_model_is_planned_within_a_second(tmp_path: Path) -> None:
    """1024 layers that are all there: nothing grows with the square of their number."""
    layer = {"input_layernorm": (2,), "post_attention_layernorm": (2,), "mlp.down_proj": (2, 2)}
    layer |= {f"{name}_proj": (2, 2) for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o")}
    layer |= {f"mlp.{name}_proj": (2, 2) for name in ("gate", "up")}
    shapes = {f"layers.{i}.{name}": shape for i in range(1024) for name, shape in layer.items()}
    shapes |= {"embed_tokens": (300, 2), "norm": (2,)}
    config = {"model_type": "llama", "hidden_size": 2, "intermediate_size": 2, "num_attention_heads": 1}
    config |= {"num_hidden_layers": 1024, "vocab_size": 300, "max_position_embeddings": 64, "tie_word_embeddings": True}
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {f"model.{name}.weight": np.ones(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert opened(tmp_path)


@pytest.mark.parametrize(
    "facts",
    [
        {".attention.key_length": 1 << 31, ".attention.value_length": None},
        {".attention.head_count": 1 << 31},
        {".attention.head_count": 1 << 31, ".attention.head_count_kv": 1 << 31},
    ],
    ids=["key_length", "head_count", "head_count_kv"],
)
def test_shapes_are_compared_before_lines_are_ordered(facts: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    facts = {".rope.dimension_count": None, **facts}
    said = refusal(write_gguf(tmp_path / "model.gguf", folder, facts=facts))
    assert re.match(r"tensor blk\.0\.attn_\w+\.weight has the shape \(\d+, 64\): the config asks for", said)


def test_divisors_are_read_where_there_are_as_many_as_can_be(folder: Path, tmp_path: Path) -> None:
    tensors = {"rope_freqs.weight": np.ones(1 << 20, np.float32)}
    large = {".attention.key_length": 1 << 21, ".attention.value_length": 1 << 21, ".rope.dimension_count": 1 << 21}
    for facts in ({}, large):
        said = refusal(write_gguf(tmp_path / "model.gguf", folder, facts=facts, tensors=tensors))
        assert "rope_freqs.weight has the shape (1048576,): must be a vector of" in said


@pytest.mark.parametrize(
    ("kind", "facts", "said"),
    [
        ("llama", {".attention.head_count": "4"}, "llama.attention.head_count is '4': must be a whole number"),
        ("llama", {".attention.head_count": [[4, 4], [4, 4]]}, "llama.attention.head_count is [4, 4]: must be a whole"),
        ("llama", {".attention.head_count_kv": ["a", "a"]}, "llama.attention.head_count_kv is 'a': must be a whole"),
        ("llama", {".feed_forward_length": [[1], [2]]}, "llama.feed_forward_length differs from layer to layer"),
        ("llama", {".rope.scaling.factor": "4"}, "llama.rope.scaling.factor is '4': must be a finite number"),
        ("llama", {".rope.scaling.factor": [4.0]}, "llama.rope.scaling.factor is [4.0]: must be a finite number"),
        ("llama", {".rope.scaling.factor": -4.0}, "llama.rope.scaling.factor is -4.0: must be above 0"),
        ("llama", {".rope.scaling.type": 4}, "llama.rope.scaling.type is 4: must be a string"),
        ("llama", {".rope.dimension_count": "8"}, "llama.rope.dimension_count is '8': must be a whole number"),
        ("llama", {".rope.dimension_count": 32}, "rope.dimension_count is 32: a head has only 16 channels"),
        ("llama", {".attention.sliding_window": "8"}, "llama.attention.sliding_window is '8': must be a whole number"),
        ("llama", {".expert_count": [0, 0]}, "llama.expert_count is [0, 0]: not supported"),
        ("qwen2", {".attention.sliding_window": [8]}, "qwen2.attention.sliding_window is [8]: must be a whole number"),
        ("gemma2", {".attention.scale": "1"}, "gemma2.attention.scale is '1': must be a finite number"),
        ("gemma3_text", {".attention.sliding_window_pattern": "x"}, "sliding_window_pattern is 'x': must be"),
        ("gemma3_text", {".attention.sliding_window_pattern": ["x", "y"]}, "must hold true or false for each layer"),
        (
            "llama",
            {".attention.key_length": None, ".attention.value_length": None, ".attention.head_count": 1 << 20},
            "embedding_length 64 does not divide among 1048576 heads, and there is no key_length",
        ),
    ],
    ids=lambda v: ",".join(v) if isinstance(v, dict) else "",
)
def test_wrong_types_in_metadata_are_named(
    kind: str, facts: dict[str, Any], said: str, originals: dict[str, Path], tmp_path: Path
) -> None:
    assert said in refusal(write_gguf(tmp_path / "model.gguf", originals[kind], facts=facts))


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        (LONG | {"short_factor": [10**400] * 8}, "short_factor is [1000"),
        (LONG | {"original_max_position_embeddings": 1}, "original_max_position_embeddings is 1: must be at least 2"),
        (LONG | {"short_factor": [1e-300] * 8}, "give rotary frequencies that are not finite"),
        (YARN | {"beta_fast": 0}, "beta_fast is 0.0: must be above 0"),
        (YARN | {"beta_slow": -1}, "beta_slow is -1.0: must be above 0"),
        (YARN | {"mscale": -1.0, "mscale_all_dim": 1.0}, "mscale -1.0 and mscale_all_dim 1.0: must be 0 or above"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 1e308}, "partial_rotary_factor is 1e+308"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 2.0}, "partial_rotary_factor is 2.0: must be at most 1"),
    ],
)
def test_numbers_of_rotation_that_make_no_sense(rope: dict[str, Any], said: str, folder: Path) -> None:
    assert said in refusal(config_changed(folder, rope_parameters=rope))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"max_position_embeddings": MOST + 1}, f"must be at most {MOST}"),
        ({"rms_norm_eps": 1e-60}, "rms_norm_eps is 1e-60: must be above 0, also in float32"),
        ({"text_config": [1]}, "text_config is [1]: must be an object"),
    ],
)
def test_values_out_of_range(values: dict[str, Any], said: str, folder: Path) -> None:
    assert said in refusal(config_changed(folder, **values))


def test_formats_are_judged_when_the_model_is_opened(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.norm.weight": np.ones(64, np.int32)}, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"tensor model.norm.weight is I32: not supported; known are F32, F16"):
        open_checkpoint(folder)
