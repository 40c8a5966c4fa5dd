"""Blocks on disk: what is put comes back or is gone, never anything else; bounded, shared, and nobody else's files."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cache import tiers
from headrace.cache.tiers import DiskTier

BIG = 1 << 30
HEAD = 88


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_what_was_put_comes_back_in_the_next_process_too(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "a" / "b", BIG)
    assert (tier.groups(key(1)), tier.get(key(1)), len(tier)) == (0, None, 0)
    assert tier.put(key(1), 0b101, [b"first", memoryview(b"second")])
    assert tier.put(key(2), 1, [bytes(1000)])
    for one in (tier, DiskTier(tmp_path / "a" / "b", BIG)):
        assert (one.groups(key(1)), one.get(key(1))) == (0b101, b"firstsecond")
        assert (one.groups(key(2)), one.get(key(2))) == (1, bytes(1000))
        assert one.groups(key(3)) == 0
        assert one.nbytes == 2 * HEAD + 11 + 1000


def test_it_stays_within_its_bytes_and_gives_up_what_was_used_least_recently(tmp_path: Path) -> None:
    most = 3 * (HEAD + 100)
    tier = DiskTier(tmp_path, most)
    for number in range(3):
        tier.put(key(number), 1, [bytes([number]) * 100])
        os.utime(tier._path(key(number), 1), (number, number))
    tier.get(key(0))
    tier.put(key(3), 1, [bytes(100)])
    assert [tier.groups(key(n)) for n in range(4)] == [1, 0, 1, 1]
    assert tier.nbytes == most == sum(file.stat().st_size for file in tmp_path.iterdir())
    assert not tier.put(key(4), 1, [bytes(most)]), "larger than all of it"
    smaller = DiskTier(tmp_path, 2 * (HEAD + 100))
    assert [smaller.groups(key(n)) for n in range(4)] == [1, 0, 0, 1], "by the time of the last use"
    assert len(files(tmp_path)) == 2


def test_more_groups_take_the_place_of_fewer(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, BIG)
    tier.put(key(1), 0b01, [b"whole"])
    tier.put(key(1), 0b11, [b"whole", b"window"])
    assert (tier.groups(key(1)), tier.get(key(1))) == (0b11, b"wholewindow")
    assert len(files(tmp_path)) == len(tier) == 1
    assert tier.nbytes == HEAD + 11


def cut(content: bytes) -> bytes:
    return content[:-1]


def lengthen(content: bytes) -> bytes:
    return content + b"x"


def empty(content: bytes) -> bytes:
    return b""


def head_only(content: bytes) -> bytes:
    return content[:40]


def flip(at: int) -> Callable[[bytes], bytes]:
    def flipped(content: bytes) -> bytes:
        return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]

    return flipped


@pytest.mark.parametrize(
    "spoil", [cut, lengthen, empty, head_only, *(flip(at) for at in (0, 20, 50, 60, HEAD, HEAD + 9))]
)
def test_a_torn_file_is_gone_with_one_warning(
    spoil: Callable[[bytes], bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = DiskTier(tmp_path, BIG)
    for number in (1, 2, 3):
        tier.put(key(number), 1, [b"0123456789"])
        if number < 3:
            path = tier._path(key(number), 1)
            path.write_bytes(spoil(path.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert tier.get(key(1)) is tier.get(key(2)) is None
    assert [record.message.split("; ")[1] for record in caplog.records] == ["such files are removed"]
    assert (tier.groups(key(1)), tier.get(key(3))) == (0, b"0123456789")
    assert files(tmp_path) == [tier._path(key(3), 1).name]


def test_a_file_under_another_name_is_not_taken(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, BIG)
    tier.put(key(1), 1, [b"content"])
    tier._path(key(1), 1).rename(tier._path(key(2), 1))
    assert DiskTier(tmp_path, BIG).get(key(2)) is None


def test_what_is_not_ours_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("notes.txt", "x.kv", f"{'0' * 63}-1.kv"):
        (tmp_path / name).write_text("mine")
    stale, fresh = (tmp_path / f"{key(n).hex()}.1-2.part" for n in (1, 2))
    for part in (stale, fresh):
        part.write_bytes(b"half")
    os.utime(stale, (0, 0))
    with caplog.at_level(logging.WARNING):
        tier = DiskTier(tmp_path, 1000)
    assert len(caplog.records) == 1
    assert "left alone" in caplog.text
    for number in range(30):
        tier.put(key(number), 1, [bytes(200)])
    assert {"notes.txt", "x.kv", f"{'0' * 63}-1.kv", fresh.name} <= set(files(tmp_path))
    assert not stale.exists()


def test_files_that_another_process_has_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = DiskTier(tmp_path, BIG)
    tier.put(key(1), 1, [b"content"])
    tier._path(key(1), 1).unlink()
    with caplog.at_level(logging.WARNING):
        assert tier.get(key(1)) is None
    assert not caplog.records
    assert tier.nbytes == 0


def test_a_disk_that_cannot_be_written_to_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = DiskTier(tmp_path / "gone", BIG)
    (tmp_path / "gone").rmdir()
    with caplog.at_level(logging.WARNING):
        assert not tier.put(key(1), 1, [b"content"])
        assert not tier.put(key(2), 1, [b"content"])
    assert len(caplog.records) == 1
    assert tier.groups(key(1)) == 0
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        DiskTier(tmp_path / "file", BIG)


def test_several_processes_and_threads_at_once(tmp_path: Path) -> None:
    """What comes back is what was put under that key, whoever writes, reads and makes room meanwhile."""
    most = 20 * (HEAD + 500)
    shared = [DiskTier(tmp_path, most) for _ in range(3)]
    wrong: list[int] = []
    until = time.monotonic() + 1.5

    def work(seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < until:
            number, tier = rng.randrange(40), rng.choice(shared)
            if rng.random() < 0.5:
                tier.put(key(number), 1, [bytes([number]) * 500])
            elif (content := tier.get(key(number))) is not None and content != bytes([number]) * 500:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    DiskTier(tmp_path, most)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= most
    assert tiers.DiskTier(tmp_path, most).nbytes <= most
