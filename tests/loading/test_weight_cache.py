"""Packed weights on disk: when they are used, when they must not be, and that nothing about them is ever an error."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace import LLM, native
from headrace.cache.pool import BLOCK, Pool, PoolShape
from headrace.loading import weight_cache, weight_file
from headrace.loading.checkpoint import load_weights, open_checkpoint
from headrace.loading.weight_cache import WeightCache, clear, entries
from headrace.program.backend import Batch, PackedLayout
from headrace.program.decoder import write_program
from headrace.program.native_backend import NativeBackend
from tests.models.gguf_files import write_gguf
from tests.models.tiny import VOCAB, tiny_checkpoint

MOST = 10**10
PROMPT = np.random.default_rng(3).integers(0, VOCAB, 40)


class Start:
    """One start of a model: loaded with the cache, run once, everything written."""

    def __init__(self, path: Path, folder: Path | None, *, most_bytes: int = MOST) -> None:
        """`folder=None`: without a cache."""
        checkpoint = open_checkpoint(path)
        program = write_program(checkpoint.spec, checkpoint.parts, 512)
        kv, count = program.kv, -(-len(PROMPT) // BLOCK)
        pool = Pool(PoolShape(count * len(kv.groups), kv.slots, kv.kv_heads, kv.dim, "f32"))
        self.store = Store(checkpoint, most_bytes=most_bytes, threads=2, folder=folder) if folder else None
        runner = NativeBackend().load(program, load_weights(checkpoint), pool, 2, None, self.store)
        batch = Batch(
            tokens=(PROMPT % program.vocab).astype(np.int32),
            positions=np.arange(len(PROMPT), dtype=np.int32),
            offsets=np.array([0, len(PROMPT)], np.int32),
            lengths=np.array([len(PROMPT)], np.int32),
            tables=tuple(np.arange(count, dtype=np.int32)[None] + count * n for n in range(len(kv.groups))),
            wanted=np.arange(len(PROMPT), dtype=np.int32),
        )
        self.bits = runner.logits(runner.run(batch)).view(np.uint32).copy()
        if self.store is not None:
            self.store.wait()
        checkpoint.source.close()

    @property
    def hit(self) -> bool:
        return self.store is not None and self.store.found is not None


class Store(WeightCache):
    found: np.ndarray | None = None

    def get(self, layout: PackedLayout) -> np.ndarray | None:
        self.found = super().get(layout)
        return self.found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A llama whose file is changed at will: rows of queries and keys reordered, one file of some 300 kB."""
    return write_gguf(tmp_path / "a model.gguf", tiny_checkpoint(tmp_path, "llama"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "weights"


@pytest.fixture
def entry(model: Path, folder: Path) -> Path:
    """Of the model, just written."""
    assert not Start(model, folder).hit
    [found] = folder.glob("*.weights")
    return found


def change(path: Path, at: int, *, keep_time: bool = True) -> None:
    """Another byte at `at`; the size is the same, and the modification time if wanted."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    if keep_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_mtime_ns == before.st_mtime_ns


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[list[Any]]:
    """Every call of a function of weight_file."""
    calls: list[Any] = []
    real: Callable[..., Any] = getattr(weight_file, name)
    with monkeypatch.context() as patch:
        patch.setattr(weight_file, name, lambda *args: (calls.append(args), real(*args))[1])
        yield calls


# hits


def test_the_second_start_packs_nothing_and_computes_the_same_bits(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved: list[int] = []
    real = native.reserve
    monkeypatch.setattr(native, "reserve", lambda nbytes: (reserved.append(nbytes), real(nbytes))[1])
    first, plain = Start(model, folder), Start(model, None)
    assert not first.hit
    assert len(reserved) == 4, "of each start its pool and its weights"
    with counted(monkeypatch, "digest_of") as digested:
        second = Start(model, folder)
    assert len(reserved) == 5, "no weights were packed"
    assert second.hit
    assert not digested, "whole files are digested only where they were touched"
    assert np.array_equal(first.bits, plain.bits)
    assert np.array_equal(second.bits, plain.bits)
    assert sorted(p.suffix for p in folder.iterdir()) == [".json", ".weights"]


@pytest.mark.parametrize("kind", ["qwen2", "gemma3_text", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_families_and_formats(kind: str, dtype: str, folder: Path, tmp_path: Path) -> None:
    """W1, W3: also through the cache a tied head and Gemma's norms are what they are without it."""
    path = tiny_checkpoint(tmp_path, kind, dtype=dtype)
    plain, first, second = Start(path, None), Start(path, folder), Start(path, folder)
    assert (first.hit, second.hit) == (False, True)
    assert np.array_equal(first.bits, plain.bits)
    assert np.array_equal(second.bits, plain.bits)


def test_w1_w3_gguf_and_safetensors_load_to_the_same_bits(folder: Path, tmp_path: Path) -> None:
    """The norms' 1 counts once; a head is the table where the file has none, and its own where it has one."""
    path = tiny_checkpoint(tmp_path, "gemma3_text", query_pre_attn_scalar=32)
    file = write_gguf(tmp_path / "model.gguf", path)
    assert np.array_equal(Start(file, folder).bits, Start(file, folder).bits)
    a, b = Start(file, folder).bits.view(np.float32), Start(path, folder).bits.view(np.float32)
    assert np.abs(a - b).max() < 1e-4 * np.abs(b).max()
    untied = tiny_checkpoint(tmp_path / "untied", "llama", tie_word_embeddings=False)
    tied = tiny_checkpoint(tmp_path / "tied", "llama", tie_word_embeddings=True)
    for model in (untied, tied):
        plain = Start(model, None)
        assert np.array_equal(Start(model, folder).bits, plain.bits)
        assert np.array_equal(Start(model, folder).bits, plain.bits)


def test_several_files(folder: Path, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "llama", shard_bytes=100_000)
    shards = sorted(path.glob("*.safetensors"))
    assert len(shards) > 2
    assert [Start(path, folder).hit, Start(path, folder).hit] == [False, True]
    os.utime(shards[1], ns=(1, 1))
    assert not Start(path, folder).hit


def test_real_file(smollm2: Path, folder: Path) -> None:
    """W2: a file of mixed formats."""
    plain, first, second = (Start(smollm2, place) for place in (None, folder, folder))
    assert (first.hit, second.hit) == (False, True)
    assert np.array_equal(first.bits, plain.bits)
    assert np.array_equal(second.bits, plain.bits)


@pytest.mark.parametrize("grants", [True, False])
def test_mapped_or_copied(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, grants: bool) -> None:
    """Where the system does not map the file in huge pages it is copied to memory that has them, if there are any."""
    first = Start(model, folder)
    huge = iter([0, 0])
    monkeypatch.setattr(weight_file, "resident", lambda: SimpleNamespace(huge_file=next(huge)))
    monkeypatch.setattr(weight_file, "grants_huge_memory", lambda: grants)
    monkeypatch.setattr(weight_file, "HUGE", 1)
    monkeypatch.setattr(weight_file, "SLICE", 10_000)
    with counted(monkeypatch, "_copied") as copied:
        second = Start(model, folder)
    assert second.hit
    assert len(copied) == grants
    assert second.store is not None and second.store.found is not None
    assert not second.store.found.flags.writeable
    assert np.array_equal(first.bits, second.bits)


def test_on_several_nodes_what_is_kept_is_copied_to_where_it_is_read(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Start(model, folder)
    mine = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr("headrace.program.native_backend.thread_nodes", lambda count: ((mine[0],), (mine[-1],)))
    reserved: list[int] = []
    real = native.reserve
    monkeypatch.setattr(native, "reserve", lambda nbytes: (reserved.append(nbytes), real(nbytes))[1])
    second = Start(model, folder)
    assert second.hit
    assert len(reserved) == 2, "the pool and the copy"
    assert np.array_equal(plain.bits, second.bits)


# the model's file is another


def test_another_time_is_another_file(model: Path, folder: Path, entry: Path) -> None:
    os.utime(model, ns=(1, 1))
    assert not Start(model, folder).hit
    assert list(folder.glob("*.weights")) == [entry], "the old entry is replaced"
    assert Start(model, folder).hit


def test_other_bytes_in_a_sampled_place(
    model: Path, folder: Path, entry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(model, model.stat().st_size - 100)
    with monkeypatch.context() as patch:  # even if nothing else told
        patch.setattr(WeightCache, "_trusted", lambda *_: True)
        changed = Start(model, folder)
    assert not changed.hit
    assert np.array_equal(changed.bits, Start(model, None).bits)


def test_other_bytes_anywhere(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same size, same modification time, same samples: the file was touched, so it is digested whole."""
    monkeypatch.setattr(weight_file, "SAMPLE", 64)
    old = Start(model, folder)
    change(model, model.stat().st_size * 63 // 100 // 4 * 4 + 2)  # between two samples
    changed = Start(model, folder)
    assert not changed.hit
    assert not np.array_equal(changed.bits, old.bits)
    assert np.array_equal(changed.bits, Start(model, None).bits)
    assert Start(model, folder).hit


def test_a_file_that_was_only_touched_is_digested_once(
    model: Path, folder: Path, entry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.chmod(0o600)
    with counted(monkeypatch, "digest_of") as digested:
        assert Start(model, folder).hit
        assert len(digested) == 1
        assert Start(model, folder).hit
        assert len(digested) == 1, "what was found is remembered"


def test_a_file_replaced_while_it_is_loaded_is_not_kept(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = model.with_name("other")
    shutil.copy(model, other)
    real = weight_file.write

    def replaced(*args: Any) -> Any:
        os.replace(other, model)
        return real(*args)

    monkeypatch.setattr(weight_file, "write", replaced)
    Start(model, folder)
    assert not list(folder.iterdir())
    assert "changed meanwhile" in caplog.text


def test_another_way_to_pack(model: Path, folder: Path, entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(native, "LAYOUT_VERSION", native.LAYOUT_VERSION + 1)
        assert not Start(model, folder).hit
    assert Start(model, folder).hit, "two versions of Headrace do not push each other out"


def test_other_rows_of_a_tensor(model: Path, folder: Path, entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a later version reads from other lines of the file must not come from an entry of an earlier one."""
    monkeypatch.setattr(WeightCache, "_origin", lambda self, name: [self._checkpoint.parts[name].tensor, "None"])
    assert not Start(model, folder).hit


# the entry is not whole


def garbled(path: Path, how: str) -> None:
    size = path.stat().st_size
    match how.split():
        case ["cut", n]:
            os.truncate(path, int(n) if int(n) >= 0 else size + int(n))
        case ["longer"]:
            os.truncate(path, size + 4096)
        case ["byte", n]:
            change(path, int(n) if int(n) >= 0 else size + int(n), keep_time=False)
        case ["zeros"]:
            os.truncate(path, 0)
            os.truncate(path, size)
        case ["length"]:
            with path.open("r+b") as file:
                file.seek(24)
                file.write(b"\xff" * 8)
        case [kind]:
            path.unlink()
            {"pipe": os.mkfifo, "folder": Path.mkdir, "link": lambda p: p.symlink_to("nowhere")}[kind](path)


HOWS = [
    *("cut 0", "cut 10", "cut 63", "cut 2000", "cut -1", "cut -4000", "cut -100000", "longer", "zeros", "length"),
    *("byte 3", "byte 40", "byte 200", "byte 2097152", "byte 2200000", "byte -20", "byte -1"),
    *("pipe", "link"),
]


@pytest.mark.parametrize("note", [True, False])
@pytest.mark.parametrize("how", HOWS)
def test_an_entry_that_is_not_whole_is_made_anew(
    model: Path, folder: Path, entry: Path, how: str, note: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plain = Start(model, None)
    garbled(entry, how)
    if not note:
        entry.with_suffix(".json").unlink()
    again = Start(model, folder)
    assert not again.hit
    assert np.array_equal(again.bits, plain.bits)
    after = Start(model, folder)
    assert after.hit
    assert np.array_equal(after.bits, plain.bits)


def test_a_folder_in_the_place_of_an_entry(model: Path, folder: Path, entry: Path) -> None:
    garbled(entry, "folder")
    assert not Start(model, folder).hit
    assert not Start(model, folder).hit


@pytest.mark.parametrize(
    "text",
    [None, "", "{", "[1]", '{"entry": 3}', '{"entry": {"size": "9"}, "sources": [1]}', "\udcff", "[" * 10**5],
    ids=range(8),
)
def test_without_its_note_an_entry_is_digested(
    model: Path, folder: Path, entry: Path, text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = entry.with_suffix(".json")
    note.unlink() if text is None else note.write_bytes(text.encode(errors="surrogateescape"))
    with counted(monkeypatch, "packed_digest") as digested:
        assert Start(model, folder).hit
        assert Start(model, folder).hit
    assert len(digested) == 1


def test_a_writer_that_died_leaves_nothing_in_the_way(model: Path, folder: Path, entry: Path) -> None:
    part = entry.with_suffix(".part")
    whole = entry.read_bytes()
    part.write_bytes(b"\xff" * (len(whole) + 5000))
    entry.unlink()
    assert not Start(model, folder).hit
    assert entry.read_bytes() == whole
    assert Start(model, folder).hit
    assert not part.exists()


# several processes

SCRIPT = """
import sys, time
from pathlib import Path
from tests.loading.test_weight_cache import Start
sys.stdin.read()
start = Start(Path(sys.argv[1]), Path(sys.argv[2]))
print(start.hit, start.bits.sum())
"""


def test_two_processes_at_once(model: Path, folder: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(model), str(folder)]
    both = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
        )
        for _ in range(2)
    ]
    for process in both:
        assert process.stdin is not None
        process.stdin.close()
    told = [process.stdout.read().split() for process in both if process.stdout is not None]
    assert [process.wait() for process in both] == [0, 0]
    assert told[0][1] == told[1][1]
    assert sorted(p.suffix for p in folder.iterdir()) == [".json", ".weights"]
    assert Start(model, folder).hit


ENDING = """
import sys, time
from pathlib import Path
from headrace.loading import weight_file
from tests.loading.test_weight_cache import Start, Store
real = weight_file.write
def slow(*args):
    time.sleep(1.5)
    return real(*args)
weight_file.write = slow
Store.wait_now, Store.wait = Store.wait, lambda self: None
start = Start(Path(sys.argv[1]), Path(sys.argv[2]))
Store.wait = Store.wait_now
print("answer", flush=True)
"""


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_program_ends_when_all_is_written_or_at_once_when_interrupted(
    model: Path, folder: Path, interrupted: bool
) -> None:
    command = [sys.executable, "-c", ENDING, str(model), str(folder)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "answer\n"
    if interrupted:
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0
    assert Start(model, folder).hit == (not interrupted)
    assert Start(model, folder).hit


def test_a_second_writer_does_not_wait(model: Path, folder: Path, entry: Path) -> None:
    part = entry.with_suffix(".part")
    entry.unlink()
    with weight_cache._alone(part) as descriptor:
        assert descriptor is not None
        assert not Start(model, folder).hit
        assert part.exists()
        assert not entry.exists()
    assert not part.exists()


def test_what_another_process_kept_meanwhile_stays(
    model: Path, folder: Path, entry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = entry.stat().st_ino
    monkeypatch.setattr(Store, "get", lambda *_: None)
    Start(model, folder)
    assert entry.stat().st_ino == before


# no room, no folder


def test_a_full_disk_is_a_warning(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.pwrite
    writes = itertools.count()

    def full(descriptor: int, data: Any, at: int) -> int:
        if next(writes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    assert not Start(model, folder).hit
    assert not list(folder.iterdir())
    [record] = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "No space left" in record.getMessage()


def test_a_really_full_disk(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a small disk")
    try:
        (disk / "filler").write_bytes(bytes(700_000))
        plain = Start(model, None)
        kept = Start(model, disk / "weights")
        assert np.array_equal(kept.bits, plain.bits)
        assert not list((disk / "weights").iterdir())
        assert "are not kept" in caplog.text
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("place", ["below a file", "not ours", "system"])
def test_a_folder_that_cannot_be_written_is_a_warning(
    model: Path, tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    if place == "below a file":
        folder = model / "weights"
    elif place == "system":
        folder = Path("/proc/headrace/weights")
    else:
        (tmp_path / "locked").mkdir(mode=0o500)
        folder = tmp_path / "locked" / "weights"
        if os.access(folder.parent, os.W_OK):
            pytest.skip("this user may write anywhere")
    assert not Start(model, folder).hit
    assert "are not kept" in caplog.text
    assert entries(folder) == []


def test_a_thread_that_cannot_be_had_is_a_warning(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ends: list[Any] = []
    monkeypatch.setattr(weight_cache.atexit, "register", ends.append)
    monkeypatch.setattr(weight_cache.atexit, "unregister", lambda end: ends.remove(end))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        assert len(Start(model, folder).bits)
    assert "are not kept: can't start new thread" in caplog.text
    assert not ends, "nobody is waited for at the end"
    Start(model, folder)
    monkeypatch.setattr(weight_file, "HUGE", 1)
    monkeypatch.setattr(weight_file, "_HUGE_ENOUGH", 2)
    monkeypatch.setattr(weight_file, "grants_huge_memory", lambda: True)
    with monkeypatch.context() as patch:  # those that would copy what is kept
        patch.setattr(threading.Thread, "start", none_left)
        assert not Start(model, folder).hit
    assert "are not used: can't start new thread" in caplog.text
    assert Start(model, folder).hit


def test_a_filesystem_without_locks_keeps_nothing(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(weight_cache.fcntl, "flock", no_locks)
    assert not Start(model, folder).hit
    assert not list(folder.glob("*.weights"))
    assert "are not kept" in caplog.text


# bounds


def test_the_entries_used_longest_ago_make_room(folder: Path, tmp_path: Path) -> None:
    models = [tiny_checkpoint(tmp_path / str(seed), "llama", seed=seed) for seed in range(3)]
    paths = []
    for number, path in enumerate(models[:2]):
        assert not Start(path, folder).hit
        [new] = [p for p in folder.glob("*.weights") if p not in paths]
        paths.append(new)
        os.utime(new.with_suffix(".json"), (1000 + number, 1000 + number))
    assert Start(models[0], folder).hit, "a use counts"
    size = paths[0].stat().st_size
    assert not Start(models[2], folder, most_bytes=2 * size + 100).hit
    assert paths[0].exists()
    assert not paths[1].exists()
    assert not paths[1].with_suffix(".json").exists()
    assert sum(p.stat().st_size for p in folder.glob("*.weights")) <= 2 * size + 100
    assert Start(models[2], folder).hit


def test_what_is_too_large_is_not_kept_and_removes_nobody(
    model: Path, folder: Path, entry: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tiny_checkpoint(tmp_path / "other", "llama", seed=1)
    Start(other, folder, most_bytes=1000)
    assert list(folder.glob("*.weights")) == [entry]
    assert "weight_cache_bytes" in caplog.text


def test_half_of_the_free_disk_is_the_most(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=700_000))
    Start(model, folder)
    assert not list(folder.glob("*.weights"))
    assert "are not kept" in caplog.text


# seen and cleared


def test_entries_and_clear(model: Path, folder: Path, entry: Path, tmp_path: Path) -> None:
    other = tiny_checkpoint(tmp_path / "other", "llama", seed=1)
    Start(other, folder)
    listed = {e.name: e for e in entries(folder)}
    assert set(listed) == {"a model", "tiny-llama"}
    assert listed["a model"].source == str(model)
    assert listed["a model"].nbytes == entry.stat().st_size
    assert clear("nobody", folder) == []
    assert [e.name for e in clear("a model", folder)] == ["a model"]
    assert not entry.exists()
    assert [e.name for e in entries(folder)] == ["tiny-llama"]
    (folder / "x.part").write_bytes(b"left by a writer that died")
    (folder / "somebody's").write_text("else")
    assert len(clear(None, folder)) == 1
    assert [p.name for p in folder.iterdir()] == ["somebody's"]


@pytest.mark.parametrize(
    "text",
    [
        '{"model": 5, "path": "/models/x.gguf"}',
        '{"model": "y", "path": ["/models/x.gguf"]}',
        '{"model": {"name": "y"}, "path": 7, "entry": {"size": "1000"}, "sources": "none"}',
        '{"model": "", "path": "/models/x.gguf"}',
        '{"model": true}',
        '[{"model": "y"}]',
        '"y"',
        "1" * 10_000,
        "[" * 100_000,
    ],
    ids=lambda text: text[:40],
)
def test_an_entry_with_a_broken_note(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    (folder / "x-1-0123456789ab.weights").write_bytes(bytes(100))
    (folder / "x-1-0123456789ab.json").write_text(text)
    assert [(e.name, e.source, e.nbytes) for e in entries(folder)] == [("x-1", "", 100)]
    assert len(clear("x-1", folder)) == 1
    assert not list(folder.iterdir())


def test_cleared_weights_stay_usable(model: Path, folder: Path, entry: Path) -> None:
    checkpoint = open_checkpoint(model)
    program = write_program(checkpoint.spec, checkpoint.parts, 512)
    kv = program.kv
    pool = Pool(PoolShape(4, kv.slots, kv.kv_heads, kv.dim, "f32"))
    store = Store(checkpoint, most_bytes=MOST, threads=1, folder=folder)
    runner = NativeBackend().load(program, load_weights(checkpoint), pool, 1, None, store)
    assert store.found is not None
    hidden = np.ones((1, program.width), np.float32)
    before = runner.logits(hidden).copy()
    clear(None, folder)
    del store.found
    assert np.array_equal(runner.logits(hidden), before)


@pytest.mark.parametrize("wanted", [True, False])
def test_the_option(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool) -> None:
    monkeypatch.setattr(weight_cache, "weights_folder", lambda: folder)
    with monkeypatch.context() as patch:
        if not wanted:
            patch.setattr(WeightCache, "__init__", lambda *_, **__: pytest.fail("is not wanted"))
        with LLM(model, weight_cache=wanted, pool_bytes=1 << 22, threads=1):
            pass
    for thread in weight_cache.threading.enumerate():
        if thread.name == "headrace-weight-cache":
            thread.join()
    assert folder.exists() == wanted


def test_pages_of_the_models_file_are_given_back(smollm2: Path, tmp_path: Path) -> None:
    script = """
import sys
from headrace import LLM
with LLM(sys.argv[1], weight_cache=False, pool_bytes=1 << 24):
    part, most = "", 0
    for line in open("/proc/self/smaps"):
        if "-" in line.split()[0]:
            part = line
        elif line.startswith("Rss:") and part.rstrip().endswith(sys.argv[1]):
            most += int(line.split()[1])
print(most)
"""
    done = subprocess.run([sys.executable, "-c", script, str(smollm2)], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < smollm2.stat().st_size // 4
