"""Tokenizers built from GGUF metadata, against transformers, SentencePiece and what the files say."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ModelFileError, RequestError
from headrace.tokenize.tokenizer import Tokenizer
from tests.tokenize.corpus import TEXTS, large
from tests.tokenize.made import byte_level, pieces

MODELS = {
    "smollm2-135m": "smollm2",
    "gemma3-270m": "gemma3",
    "qwen2.5-coder-0.5b": "qwen2.5-coder",
    "qwen2.5-coder-1.5b": "qwen2.5-coder",
}
real_models = pytest.mark.parametrize("name", MODELS)


def golden(name: str) -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "golden" / f"{MODELS[name]}.json").read_text())


def never_doubled(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """transformers puts a BOS before a text that begins with one by name; we do not."""
    bos = tokenizer.bos
    return ids[1:] if tokenizer.add_bos and ids[:2] == [bos, bos] else ids


@real_models
def test_ids_are_those_of_transformers(name: str, real: Callable[[str], Tokenizer]) -> None:
    tokenizer, want = real(name), golden(name)
    for i, text in enumerate(TEXTS):
        ids = want["own"].get(str(i), want["parsed"][i])
        assert tokenizer.encode(text) == never_doubled(ids, tokenizer), text
        literal = want["literal"].get(str(i), ids)
        assert tokenizer.encode(text, parse_special=False) == literal, text


@real_models
def test_ids_of_a_large_text(name: str, real: Callable[[str], Tokenizer]) -> None:
    ids = real(name).encode(large())
    digest = hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()
    assert {"count": len(ids), "sha256": digest} == golden(name)["large"]


def test_golden_ids_are_what_transformers_gives(transformers_smollm2: Any) -> None:
    assert [transformers_smollm2(text)["input_ids"] for text in TEXTS] == golden("smollm2-135m")["parsed"]


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60) | st.text("ab \n\t'<|>_1é中\u0301\u200d", max_size=60))
def test_any_text_as_transformers(real: Callable[[str], Tokenizer], transformers_smollm2: Any, text: str) -> None:
    if any(c.isnumeric() for c in text):  # cut otherwise by transformers, see make_golden.py
        return
    assert real("smollm2-135m").encode(text) == transformers_smollm2(text)["input_ids"]


@real_models
def test_text_comes_back(name: str, real: Callable[[str], Tokenizer]) -> None:
    tokenizer = real(name)
    for text in TEXTS:
        if name == "smollm2-135m" and any(c in text for c in "\x04\x06\x13\x14\x16\x1d\U000f0000\U00010330\U0001fffe"):
            continue  # bytes that its vocabulary lacks
        if name == "gemma3-270m":
            text = text.replace("\u2581", " ")
        ids = tokenizer.encode(text, add_bos=False)
        assert tokenizer.decode(ids, skip_special=False) == text
        assert b"".join(map(tokenizer.piece, ids)) == text.encode()


def test_smollm2_keeps_white_space_before_digits_together(real: Callable[[str], Tokenizer]) -> None:
    """As its own tokenizer.json and llama.cpp do; transformers, from GGUF, does not."""
    tokenizer = real("smollm2-135m")
    assert [tokenizer.piece(i) for i in tokenizer.encode("a  1\n\n23")] == [b"a", b"  ", b"1", b"\n\n", b"2", b"3"]


def test_facts_of_the_files(real: Callable[[str], Tokenizer]) -> None:
    smollm2 = real("smollm2-135m")
    assert (smollm2.bos, smollm2.eos, smollm2.pad, smollm2.add_bos) == (1, {2}, 2, False)  # T5: pad and eos coincide
    assert smollm2.vocab_size == 49152
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.is_special(2)
    assert not smollm2.is_special(30)
    assert smollm2.encode("") == []
    assert smollm2.decode([1, *smollm2.encode("hi"), 2]) == "hi"
    assert smollm2.decode([1, *smollm2.encode("hi"), 2], skip_special=False) == "<|im_start|>hi<|im_end|>"
    assert smollm2.piece(49152) == b""
    assert smollm2.piece(-1) == b""


def test_pieces_are_kept_up_to_a_bound(real: Callable[[str], Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    smollm2 = real("smollm2-135m")
    want = [smollm2.piece(i) for i in range(2000)]
    monkeypatch.setattr("headrace.tokenize.tokenizer._KEPT", 64)
    assert [smollm2.piece(i) for _ in range(2) for i in range(-1000, 2000)] == [*[b""] * 1000, *want] * 2
    assert len(smollm2._pieces) <= 64


def test_facts_of_gemma(real: Callable[[str], Tokenizer]) -> None:
    gemma = real("gemma3-270m")
    assert (gemma.bos, gemma.eos, gemma.pad, gemma.add_bos, gemma.vocab_size) == (2, {1}, 0, True, 262144)
    assert gemma.encode("") == [2]
    assert gemma.encode("hi", add_bos=False) == gemma.encode("hi")[1:]
    assert gemma.encode("<bos>hi") == gemma.encode("hi")
    assert gemma.encode("<bos>hi", parse_special=False)[:2] == [2, 236820]
    assert gemma.chat_template is None
    with pytest.raises(RequestError) as error:
        gemma.chat([{"role": "user", "content": "hi"}])
    assert error.value.param == "messages"


def test_fill_in_the_middle(real: Callable[[str], Tokenizer]) -> None:
    qwen = real("qwen2.5-coder-0.5b")
    assert qwen.fim is not None
    assert [qwen.piece(i) for i in qwen.fim] == [b"<|fim_prefix|>", b"<|fim_suffix|>", b"<|fim_middle|>"]
    assert qwen.encode("<|fim_prefix|>a<|fim_suffix|>")[0] == qwen.fim[0]
    before, after = "def f(x):\n    return", "\n\nprint(f(1))  # é"
    by_name = qwen.encode(f"<|fim_prefix|>{before}<|fim_suffix|>{after}<|fim_middle|>")
    assert qwen.infill(before, after) == qwen.infill(before, after, parse_special=True) == by_name
    assert qwen.infill("", "") == list(qwen.fim)
    typed = qwen.infill("<|fim_suffix|>", "<|im_end|>")
    assert [i for i in typed if qwen.is_special(i)] == list(qwen.fim)
    assert (
        qwen.decode(typed, skip_special=False) == "<|fim_prefix|><|fim_suffix|><|fim_suffix|><|im_end|><|fim_middle|>"
    )
    assert qwen.infill("<|fim_suffix|>", "", parse_special=True).count(qwen.fim[1]) == 2
    with pytest.raises(RequestError, match="half of a surrogate") as error:
        qwen.infill("a", "\ud800")
    assert error.value.param == "suffix"
    given = byte_level((), ("<a>", "<b>", "<c>"), ggml__fim_pre_token_id=257, ggml__fim_suf_token_id=256)
    with pytest.raises(RequestError, match="fill-in-the-middle") as error:
        Tokenizer.from_gguf(given).infill("a", "b")
    assert error.value.param == "suffix"
    assert Tokenizer.from_gguf(given).fim is None
    assert Tokenizer.from_gguf({**given, "tokenizer.ggml.fim_mid_token_id": 258}).fim == (257, 256, 258)


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "ok" + "x" * 5000 + "\ud83d"])
def test_half_a_surrogate_pair_is_refused(text: str) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level())
    with pytest.raises(RequestError, match="surrogate") as error:
        tokenizer.encode(text)
    assert error.value.param == "prompt"


# SentencePiece


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no-prefix"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tokenizer]:
    """A SentencePiece model and our tokenizer from its pieces, scores and types."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("sp")
    (folder / "text").write_text("\n".join(t.replace("\0", " ") for t in TEXTS if t.strip()) * 3, "utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "m"),
        model_type="bpe",
        vocab_size=1200,
        character_coverage=0.98,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=request.param,
        user_defined_symbols=["<tool>"],
        minloglevel=2,
        num_threads=1,
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "m.model"))
    count = model.get_piece_size()
    types = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in range(count)
    ]
    types[model.piece_to_id("<tool>")] = 4
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in range(count)],
        "tokenizer.ggml.scores": np.array([model.get_score(i) for i in range(count)], np.float32),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
        "tokenizer.ggml.add_space_prefix": request.param,
    }
    return model, Tokenizer.from_gguf(metadata, cache_dir=folder / "kept")


def test_ids_are_those_of_sentencepiece(trained: tuple[Any, Tokenizer]) -> None:
    model, tokenizer = trained
    for text in [*TEXTS, large()[:20000]]:
        text = text.replace("\0", " ")  # a separator to SentencePiece's C++
        ids = tokenizer.encode(text, add_bos=False, parse_special=False)
        assert ids == model.encode(text), text
        if "\u2581" not in text:
            assert tokenizer.decode(ids) == text


@settings(max_examples=300, deadline=None)
@given(st.text("the rivcamundo \n<>0x41🙂é", max_size=40))
def test_any_text_as_sentencepiece(trained: tuple[Any, Tokenizer], text: str) -> None:
    model, tokenizer = trained
    ids = tokenizer.encode(text, add_bos=False)
    assert ids == model.encode(text)
    assert tokenizer.decode(ids) == text


def test_a_user_defined_token_is_taken_whole(trained: tuple[Any, Tokenizer]) -> None:
    model, tokenizer = trained
    ids = tokenizer.encode("x<tool>y", add_bos=False, parse_special=False)
    tool = model.piece_to_id("<tool>")
    assert tool in ids
    assert not tokenizer.is_special(tool)


def test_space_in_front_of_each_stretch_of_text() -> None:
    tokenizer = Tokenizer.from_gguf(pieces(("\u2581hi", "hi", "\u2581")))
    hi, bare = (tokenizer.encode(t, add_bos=False)[0] for t in ("hi", "\u2581hi"))
    assert tokenizer.piece(hi) == b" hi"
    assert tokenizer.encode("hi") == [1, hi]  # a SentencePiece file adds BOS unless it says otherwise
    assert tokenizer.encode("hi</s>hi", add_bos=False) == [hi, 2, hi]
    assert tokenizer.encode(" hi", add_bos=False)[0] != hi
    assert tokenizer.decode([hi, hi]) == "hi hi"
    assert tokenizer.decode([2, hi], skip_special=False) == "</s> hi"
    assert bare != hi


# what files may say


def test_around_a_text() -> None:
    ends = {"ggml__bos_token_id": 256, "ggml__eos_token_id": 257}
    plain = Tokenizer.from_gguf(byte_level((), ("<s>", "</s>"), **ends))
    both = Tokenizer.from_gguf(
        byte_level((), ("<s>", "</s>"), **ends, ggml__add_bos_token=True, ggml__add_eos_token=True)
    )
    llama3 = Tokenizer.from_gguf(byte_level((), ("<s>", "</s>"), **ends, ggml__pre="llama-bpe"))
    a = plain.encode("a")
    assert (plain.add_bos, both.add_bos, llama3.add_bos, both.add_eos, plain.add_eos) == (
        False,
        True,
        True,
        True,
        False,
    )
    assert both.encode("a") == [256, *a, 257]
    assert llama3.encode("a") == [256, *a]
    assert both.encode("a", add_bos=False) == a
    assert both.encode("<s>a") == [256, *a, 257]
    assert both.encode("<s>a", parse_special=False)[:2] == [256, *plain.encode("<", add_bos=False)]


def test_ends_are_all_that_the_file_names() -> None:
    """T5"""
    controls = ("<a>", "<b>", "<c>", "<d>")
    keys = {"ggml__eos_token_id": 256, "ggml__eot_token_id": 257, "ggml__eom_token_id": 258}
    tokenizer = Tokenizer.from_gguf(byte_level((), controls, **keys, ggml__padding_token_id=256))
    assert tokenizer.eos == {256, 257, 258}
    assert tokenizer.pad == 256


def test_padding_that_is_text_stays_text() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level((), ("<a>",), ggml__padding_token_id=ord("!") - 33 + 33))
    text = tokenizer.piece(tokenizer.pad or 0).decode()
    assert tokenizer.decode(tokenizer.encode(f"a{text}b")) == f"a{text}b"


@pytest.mark.parametrize(
    ("pre", "cut"),
    [
        ("gpt-2", ["abc", "  ", " 12", "\n\n", "\n", "34", "'s", "  "]),
        ("default", ["abc", "  ", " 12", "\n\n", "\n", "34", "'s", "  "]),
        ("smollm", ["abc", "   ", "1", "2", "\n\n\n", "3", "4", "'s", "  "]),
        ("qwen2", ["abc", "  ", " ", "1", "2", "\n\n\n", "3", "4", "'s", "  "]),
        ("llama-bpe", ["abc", "  ", " ", "12", "\n\n\n", "34", "'s", "  "]),
        ("deepseek-coder", ["abc", "   ", "1", "2", "\n", "\n", "\n", "3", "4", "'", "s", "  "]),
    ],
)
def test_words_are_cut_as_the_file_says(pre: str, cut: list[str]) -> None:
    engine = Tokenizer.from_gguf(byte_level(ggml__pre=pre))._engine
    text = "abc   12\n\n\n34's  "
    assert engine.pre_tokenizer is not None
    assert [text[a:b] for _, (a, b) in engine.pre_tokenizer.pre_tokenize_str(text)] == cut


def test_llama3_takes_whole_words() -> None:
    """A token without merges is found only where whole words are looked up first."""
    metadata = byte_level(("ab",))
    metadata["tokenizer.ggml.tokens"].append("xyz")
    metadata["tokenizer.ggml.token_type"].append(1)
    assert len(Tokenizer.from_gguf(metadata).encode("xyz")) == 3
    metadata["tokenizer.ggml.pre"] = "llama-bpe"
    assert len(Tokenizer.from_gguf(metadata).encode("xyz")) == 1


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model", "bert", "bert"),
        ("model", None, "missing"),
        ("pre", "what-is-this", "what-is-this"),
        ("pre", 7, "string"),
        ("tokens", None, "missing"),
        ("tokens", [], "empty"),
        ("tokens", [1, 2], "strings"),
        ("token_type", [1], "256"),
        ("token_type", ["x"] * 256, "numbers"),
        ("merges", ["a b c"], "a b c"),
        ("merges", ["a \u2603"], "vocabulary"),
        ("bos_token_id", 256, "256"),
        ("eos_token_id", -1, "-1"),
        ("eot_token_id", "x", "x"),
        ("add_bos_token", "yes", "yes"),
    ],
)
def test_a_broken_file_is_refused_by_key(key: str, value: object, words: str) -> None:
    metadata = {**byte_level(), f"tokenizer.ggml.{key}": value}
    with pytest.raises(ModelFileError, match=rf"(?s)x\.gguf: tokenizer\.ggml\.{key}.*{words}"):
        Tokenizer.from_gguf(metadata, path="x.gguf")


def test_sentencepiece_without_scores_is_refused() -> None:
    metadata = pieces(("ab", "a", "b"))
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.scores"):
        Tokenizer.from_gguf(metadata)


# what is kept on disk


def count_of(folder: Path) -> int:
    return len(list(folder.iterdir())) if folder.exists() else 0


def test_derived_merges_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = pieces(("\u2581ab", "ab", "abc", "a", "b", "c", "\u2581"))
    first = Tokenizer.from_gguf(metadata, cache_dir=tmp_path / "new")
    [file] = (tmp_path / "new").iterdir()
    monkeypatch.setattr("headrace.tokenize.gguf.derive_merges", None)  # must not be called again
    again = Tokenizer.from_gguf(metadata, cache_dir=tmp_path / "new")
    text = "abc ab cab"
    assert again.encode(text) == first.encode(text)
    monkeypatch.undo()
    for broken in (b"", file.read_bytes()[:-8], file.read_bytes() + b"\0" * 8, bytes(file.stat().st_size)):
        file.write_bytes(broken)
        whole = Tokenizer.from_gguf(metadata, cache_dir=tmp_path / "new")
        assert whole.encode(text) == first.encode(text)
        assert len(file.read_bytes()) > 64  # written anew
    file.unlink()
    file.mkdir()  # cannot be replaced: made at each start
    assert Tokenizer.from_gguf(metadata, cache_dir=tmp_path / "new").encode(text) == first.encode(text)
    assert count_of(tmp_path / "new") == 1  # nothing half-written is left


@pytest.mark.parametrize("key", ["tokens", "scores", "token_type"])
def test_another_vocabulary_is_kept_apart(tmp_path: Path, key: str) -> None:
    metadata = pieces(("\u2581ab", "ab", "abc", "a", "b", "c"), ("<x>",))
    Tokenizer.from_gguf(metadata, cache_dir=tmp_path)
    values = list(metadata[f"tokenizer.ggml.{key}"])
    values[-2:] = [3, 3] if key == "token_type" else values[:-3:-1]
    Tokenizer.from_gguf({**metadata, f"tokenizer.ggml.{key}": values}, cache_dir=tmp_path)
    assert count_of(tmp_path) == 2


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    metadata = pieces(("ab", "a", "b"))
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        assert Tokenizer.from_gguf(metadata, cache_dir=folder).encode("ab", add_bos=False)


def test_kept_by_default_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    Tokenizer.from_gguf(pieces(("ab", "a", "b")))
    assert count_of(tmp_path / "tokenizers") == 1


def test_no_text_merges_into_a_control_token() -> None:
    metadata = pieces(("<x", ">", "<", "x", "\u2581"), ("<x>",), ggml__add_space_prefix=False)
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("<x>", add_bos=False) == [3]
    assert 3 not in tokenizer.encode("<x>", add_bos=False, parse_special=False)
