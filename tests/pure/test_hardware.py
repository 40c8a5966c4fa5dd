"""Hardware facts from made-up machines: a folder with the files that Linux would show (case O1's tree)."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from headrace import hardware

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_CPU = "33 25 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct"
V1_MEMORY = "34 25 0:30 / /sys/fs/cgroup/memory rw,nosuid shared:9 - cgroup cgroup rw,memory"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def v2(root: Path, group: str, files: dict[str, str], mount: str = V2) -> Path:
    """`files` by path below /sys/fs/cgroup."""
    return tree(
        root,
        {"proc/self/cgroup": f"0::{group}", "proc/self/mountinfo": mount}
        | {f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    )


@pytest.mark.parametrize(
    ("quota", "affinity", "count"),
    [
        ("200000 100000", 8, 2),  # docker run --cpus=2
        ("150000 100000", 8, 1),  # CPUQuota=150%
        ("50000 100000", 8, 1),  # less than one core
        ("max 100000", 8, 8),
        ("800000 100000", 2, 2),  # taskset, cpuset
        ("390000 100000", 4, 3),
        ("4000 1000", 16, 4),
        ("", 3, 3),
        ("nonsense", 3, 3),
    ],
)
def test_o1_quota_of_version_2(tmp_path: Path, quota: str, affinity: int, count: int) -> None:
    root = v2(tmp_path, "/user.slice/app", {"user.slice/app/cpu.max": quota})
    granted = hardware.granted_cores(root, affinity)
    assert granted.count == count
    assert ("quota of" in granted.reason) == (count < affinity)


def test_o1_the_least_quota_up_the_tree_counts(tmp_path: Path) -> None:
    files = {
        "cpu.max": "600000 100000",
        "a/cpu.max": "300000 100000",
        "a/b/cpu.max": "max 100000",
        "a/b/c/cpu.max": "400000 100000",
        "a/other/cpu.max": "100000 100000",
    }
    assert hardware.granted_cores(v2(tmp_path, "/a/b/c", files), 8).count == 3


def test_o1_quota_of_version_1(tmp_path: Path) -> None:
    cpu = "sys/fs/cgroup/cpu,cpuacct"
    files = {
        "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/docker/one\n1:name=systemd:/y\n0::/",
        "proc/self/mountinfo": "\n".join([V1_MEMORY, V1_CPU]),
        f"{cpu}/docker/one/cpu.cfs_quota_us": "250000",
        f"{cpu}/docker/one/cpu.cfs_period_us": "100000",
        f"{cpu}/docker/cpu.cfs_quota_us": "-1",
        f"{cpu}/docker/cpu.cfs_period_us": "100000",
        f"{cpu}/x/cpu.cfs_quota_us": "100000",
        f"{cpu}/x/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/memory/x/cpu.cfs_quota_us": "100000",
        "sys/fs/cgroup/memory/x/cpu.cfs_period_us": "100000",
    }
    assert hardware.granted_cores(tree(tmp_path, files), 8).count == 2


def test_o1_both_versions_side_by_side(tmp_path: Path) -> None:
    """A hybrid tree: version 1 has the controller, version 2 is mounted beside it without."""
    cpu = "sys/fs/cgroup/cpu,cpuacct"
    files = {
        "proc/self/cgroup": "3:cpu,cpuacct:/one\n0::/two",
        "proc/self/mountinfo": V1_CPU + "\n" + V2.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified"),
        f"{cpu}/one/cpu.cfs_quota_us": "300000",
        f"{cpu}/one/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/unified/two/cgroup.procs": "1",
    }
    assert hardware.granted_cores(tree(tmp_path, files), 8).count == 3


@pytest.mark.parametrize(
    ("group", "mount_root"),
    [
        ("/docker/abc", "/docker/abc"),  # no namespace: the host's path, and a mount of just this group
        ("/", "/"),  # a namespace of its own
        ("/../../other", "/"),  # a namespace that this process lies outside of
        ("/elsewherex/inner", "/docker/abc"),  # a mount of somebody else's group
    ],
)
def test_o1_inside_a_container(tmp_path: Path, group: str, mount_root: str) -> None:
    mount = V2.replace(" / /sys", f" {mount_root} /sys")
    root = v2(tmp_path, group, {"cpu.max": "200000 100000", "inner/cpu.max": "100000 100000"}, mount)
    tree(tmp_path, {"sys/other/cpu.max": "100000 100000"})
    assert hardware.granted_cores(root, 8).count == 2


def test_o1_a_group_below_the_mounted_one(tmp_path: Path) -> None:
    mount = V2.replace(" / /sys", " /docker/abc /sys")
    root = v2(tmp_path, "/docker/abc/inner", {"inner/cpu.max": "100000 100000", "cpu.max": "max 100000"}, mount)
    assert hardware.granted_cores(root, 8).count == 1


def test_o1_no_files_at_all(tmp_path: Path) -> None:
    assert hardware.granted_cores(tmp_path, 5).count == 5
    assert hardware.granted_cores(tmp_path, 0).count == 1
    assert hardware.granted_memory(tmp_path) == 0


def test_o1_threads_option_wins_and_omp_num_threads_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = v2(tmp_path, "/", {"cpu.max": "150000 100000"})
    with caplog.at_level(logging.INFO):
        own = hardware.threads(None, root=root, affinity=4, environ={"OMP_NUM_THREADS": "7"})
        asked = hardware.threads(3, root=root, affinity=4, environ={})
    assert own == hardware.Granted(1, "CPU quota of 1.5 cores, 4 in the process's affinity")
    assert asked.count == 3
    assert "--threads" in asked.reason
    assert "1 granted" in asked.reason
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "1 compute threads: CPU quota of 1.5 cores, 4 in the process's affinity"
    assert lines[1] == "OMP_NUM_THREADS=7 is ignored; use --threads"
    assert len(lines) == 3


MEMINFO = "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    8000000 kB\nHugePages_Total: 0"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8_000_000 * 1024),
        ({"a/b/memory.max": "max"}, 8_000_000 * 1024),
        ({"a/b/memory.max": "1000000", "a/b/memory.current": "300000"}, 700_000),
        ({"a/memory.max": "1000000"}, 1_000_000),
        ({"a/b/memory.max": "1000000", "a/b/memory.high": "600000"}, 600_000),
        ({"a/b/memory.max": "100", "a/b/memory.current": "300"}, 0),
        (
            {"a/b/memory.max": "1000", "a/b/memory.current": "700", "a/b/memory.stat": "anon 5\ninactive_file 200"},
            500,
        ),
        ({"a/b/memory.max": "2000", "a/memory.max": "1500", "a/memory.current": "1400"}, 100),
    ],
)
def test_memory_of_version_2(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    root = v2(tree(tmp_path, {"proc/meminfo": MEMINFO}), "/a/b", files)
    assert hardware.granted_memory(root) == expected


def test_memory_of_version_1(tmp_path: Path) -> None:
    memory = "sys/fs/cgroup/memory"
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "4:memory:/x/y",
        "proc/self/mountinfo": V1_MEMORY,
        f"{memory}/x/y/memory.limit_in_bytes": str(9223372036854771712),
        f"{memory}/x/memory.limit_in_bytes": "5000",
        f"{memory}/x/memory.usage_in_bytes": "3000",
        f"{memory}/x/memory.stat": "inactive_file 1\ntotal_inactive_file 500",
    }
    assert hardware.granted_memory(tree(tmp_path, files)) == 2500


def test_this_machine_answers() -> None:
    assert 1 <= hardware.granted_cores().count <= (os.cpu_count() or 1)
    assert hardware.granted_memory() > 0


def test_what_lies_on_huge_pages(tmp_path: Path) -> None:
    rollup = "55d0-7ffe ---p 00000000 00:00 0  [rollup]\nRss: 2000 kB\nAnonHugePages: 1024 kB\nFilePmdMapped: 512 kB"
    found = hardware.resident(tree(tmp_path, {"proc/self/smaps_rollup": rollup}))
    assert found == hardware.Resident(2000 * 1024, 1024 * 1024, 512 * 1024)
    assert str(found) == "2 MB resident, of it on huge pages 1 MB of its own and 1 MB of files"
    old = hardware.resident(tree(tmp_path, {"proc/self/smaps_rollup": "Rss: 2000 kB\nAnonHugePages: 1024 kB"}))
    assert old == hardware.Resident(2000 * 1024, 1024 * 1024, 0)


def test_a_system_that_does_not_tell_of_its_memory(tmp_path: Path) -> None:
    assert hardware.resident(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "granted"),
    [
        ("always [madvise] never", True),
        ("[always] madvise never", True),
        ("always madvise [never]", False),
        (None, False),
    ],
)
def test_huge_pages_are_granted(tmp_path: Path, text: str | None, granted: bool) -> None:
    files = {} if text is None else {"sys/kernel/mm/transparent_hugepage/enabled": text}
    assert hardware.grants_huge_memory(tree(tmp_path, files)) == granted


# ---- physical cores, and the nodes of memory they stand on


def machine(root: Path, siblings: dict[int, str], nodes: dict[int, str]) -> Path:
    """Of each processor the hardware threads of its core, of each node its processors."""
    cores = {f"sys/devices/system/cpu/cpu{p}/topology/thread_siblings_list": told for p, told in siblings.items()}
    return tree(root, cores | {f"sys/devices/system/node/node{n}/cpulist": told for n, told in nodes.items()})


TWO_THREADS_EACH = {p: f"{p % 4},{p % 4 + 4}" for p in range(8)}


@pytest.mark.parametrize(
    ("siblings", "count"),
    [
        (TWO_THREADS_EACH, 4),  # the second threads are the processors 4 to 7
        ({p: f"{p & ~1}-{p | 1}" for p in range(8)}, 4),  # they are the odd ones
        ({p: str(p) for p in range(8)}, 8),
        ({p: f"{p & ~3}-{p | 3}" for p in range(8)}, 8),  # two cores of four threads: few cores use them all
        ({}, 8),
        (dict.fromkeys(range(8), "?"), 8),
    ],
)
def test_one_thread_for_each_physical_core(tmp_path: Path, siblings: dict[int, str], count: int) -> None:
    granted = hardware.threads(None, root=machine(tmp_path, siblings, {}), affinity=8, environ={})
    assert granted.count == count
    assert ("physical" in granted.reason) == (count == 4)


def test_a_quota_or_an_option_below_the_physical_cores_is_kept(tmp_path: Path) -> None:
    root = machine(v2(tmp_path, "/", {"cpu.max": "200000 100000"}), TWO_THREADS_EACH, {})
    assert hardware.threads(None, root=root, affinity=8, environ={}).count == 2
    assert hardware.threads(7, root=root, affinity=8, environ={}).count == 7


def test_threads_are_shared_out_to_nodes_by_their_cores(tmp_path: Path) -> None:
    """Node 0 has the cores (0, 4), (1, 5) and (2, 6), node 1 has (3, 7)."""
    root = machine(tmp_path, TWO_THREADS_EACH, {0: "0-2,4-6", 1: "3,7"})
    zero, one = (0, 1, 2, 4, 5, 6), (3, 7)
    assert hardware.thread_nodes(4, root=root, processors=range(8)) == (zero, zero, zero, one)
    assert hardware.thread_nodes(8, root=root, processors=range(8)) == (zero,) * 6 + (one,) * 2
    assert hardware.thread_nodes(2, root=root, processors=range(8)) == (zero, zero)
    assert hardware.thread_nodes(2, root=root, processors=[0, 4, 3]) == ((0, 4), (3,))


def test_on_one_node_the_system_places_threads(tmp_path: Path) -> None:
    root = machine(tmp_path, TWO_THREADS_EACH, {0: "0-2,4-6", 1: "3,7"})
    assert hardware.thread_nodes(4, root=root, processors=[0, 1, 2, 4]) == ()
    assert hardware.thread_nodes(4, root=tmp_path / "none", processors=range(8)) == ()
