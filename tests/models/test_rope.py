"""Rotary frequencies against transformers' own, number by number, and logits far out (W5)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace.models.facts import ConfigFacts
from headrace.models.registry import family
from headrace.models.rope import Rope, frequencies, parse
from tests.models.running import Model, difference, transformers_logits
from tests.models.tiny import VOCAB, tiny_checkpoint

TOLERANCE = 1e-4
FAR = 9001
PROMPT = np.random.default_rng(3).integers(0, VOCAB, FAR).tolist()
POSITIONS = [10, 1000, 9000]

DIVISORS = {n: np.sort(np.random.default_rng(n).uniform(1, 20, 16)).tolist() for n in (1, 2)}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024},
    "yarn, all options": {
        "rope_type": "yarn",
        "factor": 6.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
        "truncate": False,
    },
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 2048,
        "short_factor": DIVISORS[1],
        "long_factor": DIVISORS[2],
    },
    "longrope, options": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 2048,
        "short_factor": DIVISORS[1],
        "long_factor": DIVISORS[2],
        "factor": 3.0,
        "attention_factor": 1.3,
    },
}
SMALL: dict[str, Any] = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}


def units_apart(a: np.ndarray, b: np.ndarray) -> int:
    """Most units in the last place between two positive float32 arrays."""
    return int(np.abs(a.view(np.int32).astype(np.int64) - b.view(np.int32)).max(initial=0))


@pytest.mark.parametrize("length", [500, FAR])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0, 1_000_000.0])
def test_frequencies_are_those_of_transformers(variant: str, length: int, theta: float) -> None:
    parameters = {**VARIANTS[variant], "rope_theta": theta}
    config = transformers.LlamaConfig(**SMALL, rope_parameters=parameters)
    kind = parameters["rope_type"]
    if kind == "default":
        exact, factor = 1.0 / theta ** (torch.arange(0, 32, 2) / 32), 1.0
    else:
        exact, factor = ROPE_INIT_FUNCTIONS[kind](config, None, seq_len=length)
    rope = parse(ConfigFacts({**SMALL, "rope_parameters": parameters}), 32, theta=1.0)
    ours, our_factor = frequencies(rope, length)
    assert ours.dtype == np.float32
    assert units_apart(ours, exact.numpy()) <= (1 if kind in ("default", "linear", "longrope", "dynamic") else 4)
    assert our_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling with type", "rope_scaling with rope_type"])
def test_every_spelling_of_the_keys(spelling: str) -> None:
    base = {"max_position_embeddings": 4096, "original_max_position_embeddings": 1024}
    inside = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if spelling == "rope_parameters":
        config = {**base, "rope_parameters": {**inside, "rope_type": "llama3", "rope_theta": 5e5}}
    else:
        key = spelling.removeprefix("rope_scaling with ")
        config = {**base, "rope_theta": 5e5, "rope_scaling": {**inside, key: "llama3"}}
    expected = parse(
        ConfigFacts({**base, "rope_theta": 5e5, "rope_scaling": {**inside, "rope_type": "llama3"}}), 64, theta=1e4
    )
    assert parse(ConfigFacts(config), 64, theta=1e4) == expected
    assert expected.theta == 5e5
    assert "trained=1024" in repr(expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_w5_logits_far_out(variant: str, tmp_path: Path) -> None:
    """The engine fixes the frequencies by its context: transformers takes them from the prompt, here as long."""
    parameters = {**VARIANTS[variant], "rope_theta": 10_000.0}
    folder = tiny_checkpoint(tmp_path, "llama", **SMALL, rope_parameters=parameters)
    theirs = transformers_logits(folder, PROMPT, attention="sdpa")[POSITIONS]
    model = Model.open(folder)
    ours = model.logits(PROMPT, chunks=[1000, 5003], context=FAR, wanted=POSITIONS)
    for position, a, b in zip(POSITIONS, ours, theirs, strict=True):
        assert difference(a, b) < TOLERANCE, position
    if variant != "default":
        plain = replace(model.spec.blocks[0].attention, rope=Rope(10_000.0, 32))
        spec = replace(model.spec, blocks=(replace(model.spec.blocks[0], attention=plain),))
        assert difference(model.logits(PROMPT, chunks=[5003], wanted=[9000], spec=spec)[0], theirs[2]) > 0.01


def test_w5_short_longrope(tmp_path: Path) -> None:
    parameters = {**VARIANTS["longrope"], "rope_theta": 10_000.0}
    folder = tiny_checkpoint(
        tmp_path, "llama", **{**SMALL, "max_position_embeddings": 8192}, rope_parameters=parameters
    )
    theirs = transformers_logits(folder, PROMPT[:1001])
    model = Model.open(folder)
    assert difference(model.logits(PROMPT[:1001], context=2048), theirs) < TOLERANCE
    assert difference(model.logits(PROMPT[:1001], context=2049), theirs) > 0.01


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_w5_partial_rotation(share: float, tmp_path: Path) -> None:
    folder = tiny_checkpoint(
        tmp_path, "phi3", num_hidden_layers=1, hidden_size=128, partial_rotary_factor=share, sliding_window=None
    )
    theirs = transformers_logits(folder, PROMPT, attention="sdpa")[POSITIONS]
    ours = Model.open(folder).logits(PROMPT, chunks=[5003], wanted=POSITIONS)
    assert difference(ours, theirs) < TOLERANCE


def test_w5_gemma3_far_out(tmp_path: Path) -> None:
    """Two bases, and a factor that only the global layers have."""
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    folder = tiny_checkpoint(tmp_path, "gemma3_text", num_hidden_layers=6, num_attention_heads=2, rope_parameters=rope)
    theirs = transformers_logits(folder, PROMPT[:3001], attention="sdpa")[[10, 1000, 3000]]
    ours = Model.open(folder).logits(PROMPT[:3001], chunks=[999, 1030], wanted=[10, 1000, 3000])
    assert difference(ours, theirs) < TOLERANCE


def test_gemma3_configs_of_every_age() -> None:
    base = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 12}
    base |= {"vocab_size": 300, "max_position_embeddings": 512, "sliding_window": 48}
    stretched = {"rope_type": "linear", "factor": 8.0}
    new = {"rope_parameters": {"full_attention": {**stretched, "rope_theta": 1e6}}}
    old = {"rope_scaling": stretched, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0}
    assert family({**base, **new}) == family({**base, **old}) == family({**base, "rope_scaling": stretched})
    spec = family({**base, **old})
    assert [b.attention.rope.theta for b in spec.blocks] == ([1e4] * 5 + [1e6]) * 2
    assert [b.attention.rope.scaling is None for b in spec.blocks] == ([True] * 5 + [False]) * 2
    wrapped = {"model_type": "gemma3", "text_config": {k: v for k, v in base.items() if k != "vocab_size"}}
    assert family(wrapped).vocab == 262_208
    with pytest.raises(ValueError, match="no text_config"):
        family({"model_type": "gemma3"})


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "proportional"}, "rope_type 'proportional' is not supported: known are default, linear"),
        ({"rope_type": "linear"}, "no rope_parameters.factor"),
        ({"rope_type": "linear", "factor": "8"}, "rope_parameters.factor is '8': must be a finite number"),
        ({"rope_type": "linear", "factor": 0}, "rope_parameters.factor is 0.0: must be above 0"),
        ({"rope_type": "llama3", "factor": 8.0}, "no rope_parameters.low_freq_factor"),
        (
            {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0]},
            "short_factor has 1 numbers: must be 16",
        ),
        ({"partial_rotary_factor": 0.1}, "over 3 channels: must be even"),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor is 2.0: must be at most 1"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0: must be above 1"),
        ([], "rope_parameters is .*: must be an object"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(parameters: Any, message: str) -> None:
    config = {
        **SMALL,
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": 300,
        "rope_parameters": parameters,
    }
    if parameters == []:
        config["rope_parameters"] = [1]
    with pytest.raises(ValueError, match=message):
        family(config)
