"""Opening a checkpoint: what its files say besides weights (T5), and errors that name the file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ModelFileError
from headrace.loading.checkpoint import GenerationDefaults, load_weights, open_checkpoint
from tests.models.gguf_files import write_gguf
from tests.models.tiny import EOS, TURN, tiny_checkpoint


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("original"), "llama", num_hidden_layers=1)


def generation_config(folder: Path, **values: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path, "llama", num_hidden_layers=1)


def test_a_folder(original: Path) -> None:
    checkpoint = open_checkpoint(original)
    assert checkpoint.name == "tiny-llama"
    assert checkpoint.path == original
    assert checkpoint.spec.context == 512
    assert checkpoint.tokenizer.encode("abc") == checkpoint.tokenizer.encode("abc", add_bos=False)
    weights = load_weights(checkpoint)
    assert {name: weight.shape for name, weight in weights.items()} == {
        name: part.shape for name, part in checkpoint.parts.items()
    }
    checkpoint.source.close()


def test_a_gguf_file_and_the_name_of_a_split_one(original: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny-Q8.gguf", original)
    checkpoint = open_checkpoint(file)
    assert checkpoint.name == "tiny-Q8"
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.eos == {EOS, TURN}, "end of sequence and end of turn"
    split = file.rename(tmp_path / "tiny-Q8-00001-of-00001.gguf")
    assert open_checkpoint(split).name == "tiny-Q8"


def test_t5_every_file_names_ends(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 100}), encoding="utf-8")
    generation_config(folder, eos_token_id=[101, 102])
    assert open_checkpoint(folder).eos == {EOS, 100, 101, 102}
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [99, 98]}), encoding="utf-8")
    generation_config(folder, eos_token_id=None)
    assert open_checkpoint(folder).eos == {EOS, 99, 98}
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}), encoding="utf-8")
    assert open_checkpoint(folder).eos == {EOS}


def test_what_the_makers_suggest(folder: Path, tmp_path: Path) -> None:
    generation_config(folder, do_sample=True, temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05)
    assert open_checkpoint(folder).generation == GenerationDefaults(0.6, 0.95, 20, None, 1.05)
    generation_config(folder, do_sample=False)
    assert open_checkpoint(folder).generation == GenerationDefaults()
    facts = {"general.sampling.temp": 0.5, "general.sampling.top_k": 64, "general.sampling.min_p": 0.25}
    file = write_gguf(tmp_path / "tiny.gguf", folder, facts=facts)
    assert open_checkpoint(file).generation == GenerationDefaults(temperature=0.5, top_k=64, min_p=0.25)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("generation_config.json", '{"top_p": 1.5}', "the suggested sampling is not usable: top_p must be"),
        ("generation_config.json", '{"eos_token_id": "2"}', "eos_token_id is '2': must be a token id or a list"),
        ("generation_config.json", '{"eos_token_id": [true]}', "eos_token_id is"),
        ("generation_config.json", "[]", "object"),
        ("generation_config.json", '{"top_k": 1, "top_k": 2}', "the key 'top_k' is there twice"),
        ("generation_config.json", '{"top_k": ' + "[" * 100_000, "is JSON nested too deep"),
        ("generation_config.json", "[" + "{}," * 300_000 + "{}]", "the header is too large"),
        ("generation_config.json", "{", "generation_config.json"),
        ("config.json", '{"model_type": "gpt2"}', "model_type 'gpt2' is not supported"),
        ("config.json", '{"model_type": "llama", "quantization_config": {"quant_method": "awq"}}', "awq"),
    ],
)
def test_errors_name_the_folder_and_the_key(file: str, text: str, message: str, folder: Path) -> None:
    (folder / file).write_text(text, encoding="utf-8")
    with pytest.raises(ModelFileError, match="tiny-llama") as caught:
        open_checkpoint(folder)
    assert message in str(caught.value)


def test_a_gguf_that_cannot_be_run_names_the_file(original: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", original, facts={".expert_count": 4})
    with pytest.raises(ModelFileError, match=r"tiny.gguf: llama.expert_count is 4: not supported"):
        open_checkpoint(file)


def test_a_tokenizer_in_a_gguf_that_is_broken_names_the_file(original: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", original, facts={"tokenizer.ggml.padding_token_id": 70_000})
    with pytest.raises(ModelFileError, match=r"tiny.gguf: .*padding_token_id"):
        open_checkpoint(file)


def test_facts_do_not_need_torch() -> None:
    """Opening a checkpoint and writing its program is quick: PyTorch comes with the backend."""
    code = (
        "import sys, headrace.loading.checkpoint, headrace.program.decoder, headrace.program.buffers;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
