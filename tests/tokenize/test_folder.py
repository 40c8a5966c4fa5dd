"""Tokenizers from folders in the Hugging Face layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Engine

from headrace.errors import ModelFileError
from headrace.tokenize.tokenizer import Tokenizer
from tests.tokenize.corpus import TEXTS

WORDS = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *"\u2581abc", "ab", "\u2581ab"]
MERGES = [("a", "b"), ("\u2581", "ab")]


def metaspace(scheme: str) -> Engine:
    """As Mistral's later tokenizer.json files: a space in front of the text, by the pre-tokenizer."""
    engine = Engine(models.BPE({w: i for i, w in enumerate(WORDS)}, MERGES, byte_fallback=True, unk_token="<unk>"))
    engine.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", scheme, split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    engine.decoder = decoders.Sequence(steps if scheme != "never" else steps[:3])
    engine.add_special_tokens(["<unk>", "<s>", "</s>"])
    engine.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return engine


def metaspace_decoded() -> Engine:
    """With the decoder that belongs to that pre-tokenizer; it knows no bytes."""
    engine = metaspace("always")
    engine.decoder = decoders.Metaspace("\u2581", "always", split=False)
    return engine


def prepend() -> Engine:
    """As Llama 2's and Phi-3's: a space in front of each stretch, by the normalizer."""
    engine = metaspace("always")
    engine.pre_tokenizer = None
    engine.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return engine


def byte_level() -> Engine:
    """As Llama 3's: byte-level, the BOS by a template beside other processors, added tokens beyond the vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    engine = Engine(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_tokens([AddedToken("<think>", normalized=False)])
    engine.add_special_tokens([AddedToken("<|begin|>"), AddedToken("<|eot|>", rstrip=True)])
    engine.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing("<|begin|> $A", None, [("<|begin|>", 257)]),
        ]
    )
    engine.enable_truncation(5)
    engine.enable_padding(length=20)
    return engine


def folder(path: Path, engine: Engine, **files: Any) -> Path:
    engine.save(str(path / "tokenizer.json"))
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


def test_the_space_in_front_with_the_metaspace_decoder(tmp_path: Path) -> None:
    engine = metaspace_decoded()
    tokenizer = Tokenizer.from_folder(folder(tmp_path, engine))
    for text in ("ab", " ab", "ab ab", "a  b"):
        ids = engine.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == engine.decode(ids)


def chat_of(*contents: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content} for content in contents]


def test_as_transformers_saved_it(tmp_path: Path, transformers_smollm2: Any, real: Callable[[str], Tokenizer]) -> None:
    transformers_smollm2.save_pretrained(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == transformers_smollm2(text)["input_ids"]
        assert (
            tokenizer.encode(text, parse_special=False)
            == transformers_smollm2(text, split_special_tokens=True)["input_ids"]
        )
        assert tokenizer.decode(ids, skip_special=False) == transformers_smollm2.decode(ids)
        assert tokenizer.decode(ids) == transformers_smollm2.decode(ids, skip_special_tokens=True)
    chat = chat_of("hi <|im_end|>", "x")
    gguf = real("smollm2-135m")
    assert tokenizer.chat(chat) == gguf.chat(chat)
    for name in ("bos", "eos", "pad", "add_bos", "add_eos", "vocab_size", "special_ids", "chat_template", "fim"):
        assert getattr(tokenizer, name) == getattr(gguf, name), name


@pytest.mark.parametrize(
    "engine", [metaspace("first"), metaspace("always"), metaspace("never"), prepend(), byte_level()]
)
def test_as_the_engine_itself(tmp_path: Path, engine: Engine) -> None:
    tokenizer = Tokenizer.from_folder(folder(tmp_path, engine))
    engine.no_truncation()
    engine.no_padding()
    for text in ("", "ab", " ab", "ab</s>ab <s>  ab", "<think>ab<|eot|>  ab<|begin|>", "a\u2581b é", "xyz 😀\n" * 10):
        ids = engine.encode(text).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == engine.decode(ids)
        assert tokenizer.decode(ids, skip_special=False) == engine.decode(ids, skip_special_tokens=False)
        engine.encode_special_tokens = True
        assert tokenizer.encode(text, parse_special=False) == engine.encode(text).ids
        engine.encode_special_tokens = False


@pytest.mark.parametrize("engine", [metaspace("first"), metaspace("always"), metaspace("never"), prepend()])
def test_the_space_in_front_in_chats_with_look_alikes(tmp_path: Path, engine: Engine) -> None:
    """A look-alike elsewhere changes nothing for the text around it."""
    template = "ab{% for m in messages %}<s>{{ m.content }}</s>{% endfor %} ab"
    path = folder(tmp_path, engine, tokenizer_config={"chat_template": template, "bos_token": "<s>"})
    tokenizer = Tokenizer.from_folder(path)
    plain = tokenizer.chat(chat_of("ab", "X", " ab"))
    marked = tokenizer.chat(chat_of("ab", "</s>", " ab"))
    x, end = plain.index(ord("X") + 3), len(plain) - plain[::-1].index(ord("X") + 3) - 1
    assert x == end
    middle = marked.index(ord("<") + 3)
    assert marked[:x] == plain[:x]
    assert middle >= x
    assert marked[-(len(plain) - x - 1) :] == plain[x + 1 :]
    assert [i for i in marked if i in tokenizer.special_ids] == [1, 2] * 3


def test_named_tokens(tmp_path: Path) -> None:
    """T5"""
    config = {"eos_token": {"content": "</s>"}, "pad_token": "<unk>", "extra_special_tokens": {"eot_token": "<turn>"}}
    special = {"bos_token": {"content": "<s>"}, "eos_token": "<s>"}
    tokenizer = Tokenizer.from_folder(
        folder(tmp_path, metaspace("never"), tokenizer_config=config, special_tokens_map=special)
    )
    assert (tokenizer.bos, tokenizer.pad, tokenizer.add_bos) == (1, 0, True)
    assert tokenizer.eos == {2}
    with_turn = metaspace("never")
    with_turn.add_special_tokens(["<turn>"])
    tokenizer = Tokenizer.from_folder(folder(tmp_path, with_turn, tokenizer_config=config))
    assert tokenizer.eos == {2, len(WORDS)}
    assert tokenizer.vocab_size == len(WORDS) + 1


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({}, [1, 263]),
        ({"add_bos_token": True}, [1, 263]),
        ({"add_bos_token": False}, [263]),
        ({"add_bos_token": True, "add_eos_token": True}, [1, 263, 2]),
        ({"add_eos_token": True}, [263, 2]),
    ],
)
def test_around_a_text(tmp_path: Path, config: dict[str, Any], want: list[int]) -> None:
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = Tokenizer.from_folder(folder(tmp_path, metaspace("never"), tokenizer_config={**named, **config}))
    assert tokenizer.encode("ab") == want
    assert tokenizer.encode("ab", add_bos=False) == [263]


def test_tokens_that_only_the_config_knows(tmp_path: Path) -> None:
    config = {
        "added_tokens_decoder": {
            "999": {"content": "<tool>", "special": False},
            "998": {"content": "<call>", "special": True},
            "1": {"content": "<s>", "special": True},
        },
        "mask_token": "<mask>",
    }
    tokenizer = Tokenizer.from_folder(folder(tmp_path, metaspace("never"), tokenizer_config=config))
    call, tool, mask = range(len(WORDS), len(WORDS) + 3)
    assert tokenizer.encode("<tool><call><mask>", add_bos=False) == [tool, call, mask]
    assert tokenizer.special_ids >= {call, mask}
    assert tool not in tokenizer.special_ids
    assert tokenizer.vocab_size == mask + 1
    literal = tokenizer.encode("<tool><call>", add_bos=False, parse_special=False)
    assert literal[0] == tool
    assert call not in literal


def test_where_templates_are(tmp_path: Path) -> None:
    path = folder(tmp_path, metaspace("never"))
    assert Tokenizer.from_folder(path).chat_template is None
    config = {"chat_template": [{"name": "default", "template": "list"}, {"name": "tool_use", "template": "tools"}]}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(path)
    assert tokenizer.render(chat_of("x")) == "list"
    assert tokenizer.render(chat_of("x"), tools=[{"type": "function"}]) == "tools"
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "config"}))
    assert Tokenizer.from_folder(path).chat_template == "config"
    (path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert Tokenizer.from_folder(path).chat_template == "json"
    (path / "chat_template.jinja").write_text("jinja é\n", encoding="utf-8")
    assert Tokenizer.from_folder(path).chat_template == "jinja é\n"
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text("more")
    assert Tokenizer.from_folder(path).render(chat_of("x"), tools=[{}]) == "more"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{", "not a tokenizer"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "decoder null"),
        ("tokenizer_config.json", "{", "JSON"),
        ("tokenizer_config.json", "[]", "object"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat_template"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "x"}]}', "chat_template"),
        ("special_tokens_map.json", "\x00", "JSON"),
        ("chat_template.json", "[" * 100_000, "JSON"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, text: str | None, words: str) -> None:
    folder(tmp_path, metaspace("never"))
    if text is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelFileError, match=words) as error:
        Tokenizer.from_folder(tmp_path)
    assert error.value.path == str(tmp_path if text is None else tmp_path / name)
