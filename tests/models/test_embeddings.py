"""Embeddings of every family against transformers' last hidden states; and what the files say of pooling."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from headrace import LLM, HeadraceError, RequestError
from headrace.loading.checkpoint import open_checkpoint
from tests.models.gguf_files import write_gguf
from tests.models.tiny import FAMILIES, VOCAB, tiny_checkpoint

PROMPTS = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (1, 40, 150)]


@torch.inference_mode()
def theirs(path: Path, tokens: list[int]) -> np.ndarray:
    """float32 [tokens, width]: after the last norm."""
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    states: np.ndarray = model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0].numpy()
    return states


def normed(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_pooled_hidden_states_of_transformers(family: str, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, family)
    backend = "torch" if family in ("mistral", "phi3") else "native"  # their heads have 24 channels
    options = {"threads": 1, "kv_format": "f32", "context": 256, "budget": 64, "weight_cache": False}
    with LLM(path, backend=backend, **options) as llm:
        for tokens in PROMPTS:
            states = theirs(path, tokens)
            width = states.shape[1]
            for pooling, want in (("mean", states.mean(axis=0)), ("last", states[-1])):
                got = np.array(llm.embed([tokens], pooling, normalize=False)[0].embedding)
                assert np.abs(got - want).max() < 2e-4 * np.abs(want).max(), (pooling, len(tokens))
                for count in (width, width // 2, 1):
                    cut = np.array(llm.embed([tokens], pooling, dimensions=count)[0].embedding)
                    assert cut.shape == (count,)
                    assert cut == pytest.approx(normed(want[:count]), abs=1e-4)


def test_the_default_is_what_the_files_say(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "llama")
    assert open_checkpoint(path).pooling is None
    told = path / "1_Pooling" / "config.json"
    told.parent.mkdir()
    for modes, pooling in (
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True}, None),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, None),
    ):
        told.write_text(json.dumps(modes), encoding="utf-8")
        assert open_checkpoint(path).pooling == pooling
    told.write_text(json.dumps({"pooling_mode_lasttoken": True}), encoding="utf-8")
    with LLM(path, threads=1, context=64, weight_cache=False) as llm:
        assert llm.embed([[1, 2, 3]])[0].embedding == llm.embed([[1, 2, 3]], "last")[0].embedding
        assert llm.embed([[1, 2, 3]])[0].embedding != llm.embed([[1, 2, 3]], "mean")[0].embedding


@pytest.mark.parametrize(("kind", "pooling"), [(None, None), (0, None), (1, "mean"), (2, None), (3, "last"), (4, None)])
def test_what_gguf_says(kind: int | None, pooling: str | None, tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    path = write_gguf(tmp_path / "tiny.gguf", source, facts={} if kind is None else {".pooling_type": kind})
    assert open_checkpoint(path).pooling == pooling


def test_what_cannot_be_embedded(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "llama")
    with LLM(path, threads=1, context=64, weight_cache=False) as llm:
        assert len(llm.embed(list(range(64)))) == 1, "a whole context needs no room for an answer"
        assert llm.embed("é")[0].prompt_token_ids == [*"é".encode()] or len(llm.embed("é")[0].prompt_token_ids) == 2
        for prompts, options, param in (
            ([[1], [2] * 65], {}, "prompts[1]"),
            ([[1], []], {}, "prompts[1]"),
            ([], {}, "prompts"),
            ("", {}, "prompt"),
            ([[1, VOCAB]], {}, "prompt"),
            ([[1]], {"dimensions": 0}, "dimensions"),
            ([[1]], {"dimensions": 65}, "dimensions"),
            ([[1]], {"dimensions": True}, "dimensions"),
            ([[1]], {"pooling": "cls"}, "pooling"),
            ([[1]], {"pooling": ""}, "pooling"),
            ([[1]], {"truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
        ):
            with pytest.raises(RequestError) as error:
                llm.embed(prompts, **options)  # type: ignore[arg-type]
            assert error.value.param == param
        cut = llm.embed([[5] * 60 + [1, 2]], truncate_prompt_tokens=2)[0]
        assert cut.prompt_token_ids == [1, 2]
        assert cut.embedding == llm.embed([[1, 2]])[0].embedding
        assert len(llm.embed([[5] * 100], truncate_prompt_tokens=-1)[0].prompt_token_ids) == 64
        one = np.array(llm.embed([[1, 2]])[0].embedding, np.float32)
        assert float(np.linalg.norm(one)) == pytest.approx(1, abs=1e-6)


def test_a_model_that_gives_no_finite_states(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = float("nan")
    model.save_pretrained(path)
    with LLM(path, threads=1, context=64, weight_cache=False) as llm:
        good = llm.embed([[1, 2, 3]])[0].embedding
        for pooling in ("mean", "last"):
            with pytest.raises(HeadraceError, match="not finite"):
                llm.embed([[1, 7, 3]], pooling)
        assert llm.embed([[1, 2, 3]])[0].embedding == good
