"""`headrace cache`: what is listed, what is cleared, and what it says when there is nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with the packed weights of two models, as `headrace cache` sees them: it does not look into them."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "weights"
    folder.mkdir()
    for number, name in enumerate(("qwen", "smol lm")):
        stem = f"{name.replace(' ', '_')}-0123456789ab"
        (folder / f"{stem}.weights").write_bytes(bytes(1000 * (number + 1)))
        note = folder / f"{stem}.json"
        note.write_text(json.dumps({"model": name, "path": f"/models/{name}.gguf"}))
        os.utime(note, (1_700_000_000, 1_700_000_000 + number))
    return folder


def headrace(*args: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"TZ": "UTC"}
    command = [sys.executable, "-m", "headrace", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ)


def test_the_table(folder: Path) -> None:
    done = headrace("cache")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "MODEL      SIZE  LAST USED         MADE FROM",
        "qwen     1.0 kB  2023-11-14 22:13  /models/qwen.gguf",
        "smol lm  2.0 kB  2023-11-14 22:13  /models/smol lm.gguf",
    ]


def test_json(folder: Path) -> None:
    listed = json.loads(headrace("cache", "--json").stdout)
    assert listed[1] == {
        "model": "smol lm",
        "source": "/models/smol lm.gguf",
        "path": str(folder / "smol_lm-0123456789ab.weights"),
        "nbytes": 2000,
        "last_used": 1_700_000_001.0,
    }


def test_an_entry_without_its_note_is_named_by_its_file(folder: Path) -> None:
    (folder / "qwen-0123456789ab.json").unlink()
    assert headrace("cache").stdout.splitlines()[1].startswith("qwen     1.0 kB")


def test_entries_with_broken_notes_are_unknown_and_can_be_cleared(folder: Path) -> None:
    for number, text in enumerate(('{"model": 5, "path": ["x"], "entry": {"size": "1000"}}', "[" * 100_000, "{")):
        (folder / f"qwen-{number:012}.weights").write_bytes(b"x")
        (folder / f"qwen-{number:012}.json").write_text(text)
    done = headrace("cache")
    assert (done.returncode, done.stderr) == (0, "")
    ends = [(line.split()[0], line.split()[-1]) for line in done.stdout.splitlines()[1:5]]
    assert ends == [("qwen", "unknown")] * 3 + [("qwen", "/models/qwen.gguf")]
    assert [line["source"] for line in json.loads(headrace("cache", "--json").stdout)][:3] == [""] * 3
    assert headrace("cache", "clear", "qwen").stderr == "4 removed, 1.0 kB\n"
    assert sorted(p.name for p in folder.iterdir()) == ["smol_lm-0123456789ab.json", "smol_lm-0123456789ab.weights"]


def test_names_that_are_no_text(folder: Path) -> None:
    """Of a file whose name is no UTF-8, and of half a character that somebody wrote into a note."""
    for number, name in (("0", os.fsdecode(b"caf\xe9")), ("1", "\ud83d")):
        (folder / f"caf_-00000000000{number}.weights").write_bytes(b"x")
        (folder / f"caf_-00000000000{number}.json").write_text(json.dumps({"model": name, "path": f"/m/{name}.gguf"}))
    done = headrace("cache")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["MODEL", "caf?", "?", "qwen", "smol"]
    assert len(json.loads(headrace("cache", "--json").stdout)) == 4
    assert headrace("cache", "clear", "x").stderr.endswith("there are: ?, caf?, qwen, smol lm\n")
    assert headrace("cache", "clear", os.fsdecode(b"caf\xe9")).stderr == "1 removed, 1 B\n"
    assert len(json.loads(headrace("cache", "clear", "--json").stdout)) == 3


def test_clear_one(folder: Path) -> None:
    done = headrace("cache", "clear", "smol lm")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "1 removed, 2.0 kB\n")
    assert sorted(p.name for p in folder.iterdir()) == ["qwen-0123456789ab.json", "qwen-0123456789ab.weights"]


def test_clear_all(folder: Path) -> None:
    done = headrace("cache", "clear", "--json")
    assert [line["model"] for line in json.loads(done.stdout)] == ["qwen", "smol lm"]
    assert not list(folder.iterdir())
    again = headrace("cache", "clear")
    assert (again.returncode, again.stderr) == (0, "0 removed, 0 B\n")


def test_an_unknown_name_is_refused(folder: Path) -> None:
    done = headrace("cache", "clear", "smollm")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: no packed weights of 'smollm' are kept; there are: qwen, smol lm\n"
    assert len(list(folder.iterdir())) == 4


def test_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "nowhere"))
    done = headrace("cache")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "no packed weights are kept\n")
    assert json.loads(headrace("cache", "--json").stdout) == []
    assert not (tmp_path / "nowhere").exists()


def test_help_and_wrong_usage(folder: Path) -> None:
    assert "clear" in headrace("cache", "--help").stdout
    for args in (["cache", "nonsense"], ["cache", "--json", "clear"], ["cache", "clear", "a", "b"]):
        done = headrace(*args)
        assert (done.returncode, done.stdout) == (2, ""), args
        assert "Traceback" not in done.stderr
    assert len(list(folder.iterdir())) == 4
