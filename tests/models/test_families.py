"""Each family against transformers, from checkpoints that transformers saved; and every fact of a Spec matters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.models.spec import Attention, Block, Spec
from tests.models.running import Model, difference, transformers_logits
from tests.models.tiny import FAMILIES, VOCAB, tiny_checkpoint

TOLERANCE = 1e-4
PROMPT = np.random.default_rng(1).integers(0, VOCAB, 150).tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), request.param)


@pytest.fixture(scope="module")
def theirs(checkpoint: Path) -> np.ndarray:
    return transformers_logits(checkpoint, PROMPT)


@pytest.mark.parametrize("chunks", [[], [1, 2, 33, 64, 100]], ids=["whole", "cut"])
def test_logits_are_those_of_transformers(checkpoint: Path, theirs: np.ndarray, chunks: list[int]) -> None:
    assert difference(Model.open(checkpoint).logits(PROMPT, chunks=chunks), theirs) < TOLERANCE


def test_a_bf16_pool_rounds_keys_and_values_only(checkpoint: Path, theirs: np.ndarray) -> None:
    moved = difference(Model.open(checkpoint).logits(PROMPT, chunks=[70], kv_format="bf16"), theirs)
    assert 1e-5 < moved < 2e-2


def _everywhere(spec: Spec, **changes: Any) -> Spec:
    """The spec with changed facts of attention in every layer."""
    return replace(spec, blocks=tuple(replace(b, attention=replace(b.attention, **changes)) for b in spec.blocks))


def _each_block(spec: Spec, **changes: Any) -> Spec:
    return replace(spec, blocks=tuple(replace(b, **changes) for b in spec.blocks))


def mutations(spec: Spec) -> Iterator[tuple[str, Spec]]:
    """Everything that a Spec says, said wrong, where this one says it at all."""
    block = spec.blocks[0]
    first = block.attention
    other = "gelu_tanh" if block.feed_forward.activation == "silu" else "silu"
    yield "activation", _each_block(spec, feed_forward=replace(block.feed_forward, activation=other))
    yield "scale", _everywhere(spec, scale=first.scale * 1.5)
    yield "base", _everywhere(spec, rope=replace(first.rope, theta=first.rope.theta * 3))
    yield "half a rotation", _everywhere(spec, rope=replace(first.rope, dim=first.rope.dim // 4 * 2))
    yield "eps", replace(spec, eps=0.1)
    if any(b.attention.window for b in spec.blocks):
        yield "no window", _everywhere(spec, window=None)
        yield "a wrong window", replace(spec, blocks=tuple(map(_narrower, spec.blocks)))
        if not all(b.attention.window for b in spec.blocks):
            yield "windows in the wrong layers", replace(spec, blocks=spec.blocks[1:] + spec.blocks[:1])
    if first.softcap is not None:
        yield "no cap on scores", _everywhere(spec, softcap=None)
    if spec.logit_softcap is not None:
        yield "no cap on logits", replace(spec, logit_softcap=None)
    if spec.norm_offset:
        yield "norm weights as they are", replace(spec, norm_offset=0.0)
    if spec.embed_scale != 1.0:
        yield "embedding as it is", replace(spec, embed_scale=1.0)
    if block.post_norms:
        yield "no norms after the branches", _each_block(spec, post_norms=False)


def _narrower(block: Block) -> Block:
    a: Attention = block.attention
    return block if a.window is None else replace(block, attention=replace(a, window=a.window - 4))


def test_every_mutation_of_the_spec_is_seen(checkpoint: Path, theirs: np.ndarray) -> None:
    model = Model.open(checkpoint)
    moved = {name: difference(model.logits(PROMPT, spec=spec), theirs) for name, spec in mutations(model.spec)}
    assert len(moved) >= 5
    assert {name: by for name, by in moved.items() if by < 100 * TOLERANCE} == {}


def test_every_optional_weight_is_seen(checkpoint: Path, theirs: np.ndarray) -> None:
    """Biases and norms of queries and keys: leaving one kind out moves the logits."""
    model = Model.open(checkpoint)
    for kind in ("attn.q.bias", "attn.k.bias", "attn.v.bias", "_norm.weight"):
        fewer = {n: w for n, w in model.weights.items() if not (n.endswith(kind) and ".attn." in n)}
        # A bias of the keys moves all scores of a query alike, but for the rotation: little.
        least = TOLERANCE if kind == "attn.k.bias" else 100 * TOLERANCE
        assert fewer.keys() == model.weights.keys() or (
            difference(Model(model.spec, fewer).logits(PROMPT), theirs) > least
        ), kind


@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_files_and_half_floats_load_alike(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, family, shard_bytes=100_000, dtype="bfloat16")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    theirs = transformers_logits(folder, PROMPT)
    assert difference(Model.open(folder).logits(PROMPT), theirs) < TOLERANCE


@pytest.mark.parametrize(
    "overrides", [{"num_key_value_heads": 1}, {"num_key_value_heads": 4}, {"attention_bias": True}]
)
def test_head_counts_and_biases_are_facts_of_the_checkpoint(overrides: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama", mlp_bias=True, **overrides)
    assert difference(Model.open(folder).logits(PROMPT), transformers_logits(folder, PROMPT)) < TOLERANCE
