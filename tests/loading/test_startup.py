"""W7 where a user meets it: a broken model ends the command with one line and code 1, without signal or traceback."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.models.gguf_files import write_gguf
from tests.models.tiny import tiny_checkpoint


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("original"), "llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def whole(original: Path) -> bytes:
    return write_gguf(original.parent / "whole.gguf", original).read_bytes()


def broken(folder: Path, kind: str, original: Path, whole: bytes) -> tuple[Path, str]:
    """A model that is broken in that way, and a word of the reason."""
    file = folder / "model.gguf"
    name = b"token_embd.weight"
    at = whole.index(name) + len(name)  # its axes (uint32), dimensions (uint64 each), type (uint32), offset (uint64)
    changes: dict[str, tuple[int, bytes, str]] = {
        "no dimension": (at + 4, struct.pack("<Q", 0), "dimension of 0"),
        "nine axes": (at, struct.pack("<I", 9), "9 dimensions"),
        "far offset": (at + 24, struct.pack("<Q", 1 << 63), "ends at byte"),
        "unknown type": (at + 20, struct.pack("<I", 16), "IQ2_XXS"),
    }
    match kind:
        case "last byte" | "half":
            file.write_bytes(whole[:-1] if kind == "last byte" else whole[: len(whole) // 2])
            return file, "cut short"
        case "missing part":
            part = folder / "model-00001-of-00002.gguf"
            part.write_bytes(whole)
            return part, "part 2 of 2 is missing"
        case "link to nothing":
            file.symlink_to(folder / "gone.gguf")
            return file, "which is not there"
        case "long header":
            copy = folder / "copy"
            shutil.copytree(original, copy)
            with (copy / "model.safetensors").open("r+b") as weights:
                weights.write(struct.pack("<Q", 1 << 60))
            return copy, "1,152,921,504,606,846,976"
    start, value, word = changes[kind]
    file.write_bytes(whole[:start] + value + whole[start + len(value) :])
    return file, word


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("show", "no dimension"),
        ("show", "nine axes"),
        ("show", "far offset"),
        ("show", "missing part"),
        ("show", "link to nothing"),
        ("run", "last byte"),
        ("run", "unknown type"),
        ("run", "long header"),
        ("serve", "half"),
        ("serve", "long header"),
    ],
)
def test_w7_a_broken_model_is_one_line_and_code_1(
    command: str, kind: str, original: Path, whole: bytes, tmp_path: Path
) -> None:
    path, word = broken(tmp_path, kind, original, whole)
    more = {"show": [], "run": ["hi"], "serve": ["--port", "0"]}[command]
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "headrace", command, str(path), *more],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("error: ") or "\nerror: " in done.stderr
    assert "Traceback" not in done.stderr
    assert word in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert time.monotonic() - start < 20
