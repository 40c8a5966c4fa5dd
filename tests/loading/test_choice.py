"""Which files of a listing are a model."""

from __future__ import annotations

import pytest

from headrace.errors import ModelNotFoundError
from headrace.loading import choice

NAMES = [
    "README.md",
    "m-Q4_K_M.gguf",
    "m-Q4_K_S.gguf",
    "m-Q8_0.gguf",
    "m.Q4_0.gguf",
    "m-IQ2_XS.gguf",
    "mmproj-m-f16.gguf",
    "imatrix.gguf",
    "big/m-f16-00001-of-00002.gguf",
    "big/m-f16-00002-of-00002.gguf",
]


def pick(want: str | None, names: list[str] = NAMES) -> tuple[str, ...]:
    return choice.choose_gguf(choice.gguf_models(names), want, "the repo").files


@pytest.mark.parametrize(
    ("want", "file"),
    [
        (None, "m-Q4_K_M.gguf"),
        ("q4_k_m", "m-Q4_K_M.gguf"),
        ("Q4_K_S", "m-Q4_K_S.gguf"),
        ("q4_0", "m.Q4_0.gguf"),
        ("iq2_xs", "m-IQ2_XS.gguf"),
        ("M-q8_0.GGUF", "m-Q8_0.gguf"),
        ("m-q8_0", "m-Q8_0.gguf"),
        ("F16", "big/m-f16-00001-of-00002.gguf"),
        ("m-f16-00002-of-00002.gguf", "big/m-f16-00001-of-00002.gguf"),
        ("big/m-f16-00001-of-00002", "big/m-f16-00001-of-00002.gguf"),
    ],
)
def test_a_want_finds_its_file(want: str | None, file: str) -> None:
    assert pick(want)[0] == file


def test_parts_come_in_order() -> None:
    assert pick("f16") == ("big/m-f16-00001-of-00002.gguf", "big/m-f16-00002-of-00002.gguf")


@pytest.mark.parametrize("want", ["Q4_K", "Q5_K_M", "nothing.gguf", "mmproj-m-f16.gguf", "README.md"])
def test_what_is_absent_lists_what_is_there(want: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no file or type .*m-Q4_K_M\.gguf, m-Q4_K_S\.gguf, m-Q8_0\.gguf"):
        pick(want)


def test_ambiguity_names_the_candidates() -> None:
    with pytest.raises(ModelNotFoundError, match=r"fits several.*a-Q8_0\.gguf, b-Q8_0\.gguf"):
        pick("Q8_0", ["a-Q8_0.gguf", "b-Q8_0.gguf"])
    with pytest.raises(ModelNotFoundError, match="several models"):
        pick(None, ["a-Q8_0.gguf", "b-Q8_0.gguf"])


def test_a_missing_part_is_named() -> None:
    with pytest.raises(ModelNotFoundError, match=r"x-00002-of-00003\.gguf"):
        pick(None, ["x-00001-of-00003.gguf", "x-00003-of-00003.gguf"])


def test_a_lying_count_of_parts_does_not_cost() -> None:
    assert len(choice.gguf_models(["x-00001-of-99999.gguf"])[0].missing) < 1000


def test_types_without_support_are_never_a_default() -> None:
    with pytest.raises(ModelNotFoundError, match="name one"):
        pick(None, ["a-IQ1_S.gguf", "a-IQ2_XS.gguf"])
    assert pick(None, ["only-IQ1_S.gguf"]) == ("only-IQ1_S.gguf",)


@pytest.mark.parametrize("name", ["../x", "a/../x", "/x", "a//x", "", ".", "a\\..\\x", "x\n", "a/\0", "./x", "x/"])
def test_names_that_leave_their_folder_are_unsafe(name: str) -> None:
    assert not choice.safe(name)


@pytest.mark.parametrize("name", ["x", "a/b.gguf", "..x", "x..gguf", "模型.gguf"])
def test_plain_names_are_safe(name: str) -> None:
    assert choice.safe(name)


def test_weights_of_a_folder() -> None:
    assert choice.safetensors(["model.safetensors", "consolidated.safetensors"]) == ["model.safetensors"]
    assert choice.safetensors(["b.safetensors", "a.safetensors", "adapter_model.safetensors", "sub/x.safetensors"]) == [
        "a.safetensors",
        "b.safetensors",
    ]
    assert choice.needs_index(["model.safetensors.index.json", "model-00001-of-00002.safetensors"])
    assert not choice.needs_index(["model.safetensors.index.json", "model.safetensors"])
    assert choice.is_folder_model(["config.json", "model.safetensors"])
    assert not choice.is_folder_model(["config.json", "adapter_model.safetensors"])
    assert not choice.is_folder_model(["config.json", "pytorch_model.bin"])
