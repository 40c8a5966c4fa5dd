"""W7 where a user meets it: a broken model ends the command with one line and code 1, without signal or traceback."""

from __future__ import annotations

import json
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
    folder.mkdir(exist_ok=True)

    def behind(name: bytes) -> int:
        return whole.index(name) + len(name)

    at = behind(b"token_embd.weight")  # its axes (uint32), dimensions (uint64 each), type (uint32), offset (uint64)
    tokens = behind(b"tokenizer.ggml.tokens")  # type and element type (uint32 each), count (uint64)
    bos, eos = b"tokenizer.ggml.bos_token_id", b"tokenizer.ggml.eos_token_id"
    changes: dict[str, tuple[int, bytes, str]] = {
        "no dimension": (at + 4, struct.pack("<Q", 0), "dimension of 0"),
        "nine axes": (at, struct.pack("<I", 9), "9 dimensions"),
        "far offset": (at + 24, struct.pack("<Q", 1 << 63), "ends at byte"),
        "unknown type": (at + 20, struct.pack("<I", 16), "IQ2_XXS"),
        "long vocabulary": (tokens + 8, struct.pack("<Q", 1 << 40), "1,099,511,627,776"),
        "other elements": (tokens + 4, struct.pack("<I", 4), "metadata"),
        "key twice": (whole.index(bos), eos, f"{eos.decode()!r} is there twice"),
    }
    match kind:
        case "last byte" | "half":
            file.write_bytes(whole[:-1] if kind == "last byte" else whole[: len(whole) // 2])
            return file, "cut short"
        case "no alignment":
            return write_gguf(file, original, facts={"general.alignment": 0}), "a power of two of at least 8, not 0"
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


ALL = """
import json, resource, sys, time
from headrace import LLM, HeadraceError, native
native.Threads = native.Packed = native.Pool = native.reserve = None  # nobody may get so far
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
for path in sys.argv[1:]:
    before, start = peak(), time.monotonic()
    try:
        LLM(path)
    except HeadraceError as error:
        print(json.dumps([str(error), time.monotonic() - start, peak() - before]), flush=True)
"""
KINDS = [
    *("last byte", "half", "no dimension", "nine axes", "far offset", "no alignment", "long vocabulary"),
    *("other elements", "unknown type", "key twice", "missing part", "long header", "link to nothing"),
]


def test_w7_the_engine_refuses_every_kind(original: Path, whole: bytes, smollm2: Path, tmp_path: Path) -> None:
    """Before memory is taken or a thread is started, soon, and in little memory: one process meets all of them."""
    files = [broken(tmp_path / kind, kind, original, whole) for kind in KINDS]
    for cut in (1, 1 << 20):
        copy = tmp_path / f"{cut}.gguf"
        shutil.copyfile(smollm2, copy)
        os.truncate(copy, copy.stat().st_size - cut)
        files.append((copy, "cut short"))
    command = [sys.executable, "-c", ALL, *(str(path) for path, _ in files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    told = [json.loads(line) for line in done.stdout.splitlines()]
    for (path, word), (error, seconds, nbytes) in zip(files, told, strict=True):
        assert str(path) in error or path.is_dir()
        assert word in error
        assert seconds < 10
        assert nbytes < 64 << 20, error
