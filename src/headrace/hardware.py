"""What of the machine's cores and memory this process was granted.

Everything is read from files below a root directory, so that tests can lay out machines that do not exist. Reads
Linux's /proc and /sys; what a file does not say is None or empty, never guessed. Decides nothing about models.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

ROOT = Path("/")

MANY_CORES = 4
"""With fewer, a core's second hardware thread is worth having."""


@dataclass(frozen=True, slots=True)
class Granted:
    """A number of cores or threads, and where it comes from, in words."""

    count: int
    reason: str


def granted_cores(root: Path = ROOT, affinity: int | None = None) -> Granted:
    """Cores this process may really use: the lesser of its affinity and the CPU quota of its control groups, versions
    1 and 2, rounded down; at least 1. `affinity`: how many processors the scheduler may use, default: asks the kernel.
    """
    allowed = len(os.sched_getaffinity(0)) if affinity is None else affinity
    quota = min(filter(None, (_quota(folder) for folder in _groups(root, "cpu"))), default=None)
    if quota is None or quota >= allowed:
        return Granted(max(1, allowed), f"{allowed} in the process's affinity, no lower CPU quota")
    return Granted(max(1, int(quota)), f"CPU quota of {quota:g} cores, {allowed} in the process's affinity")


def granted_memory(root: Path = ROOT) -> int:
    """Bytes of memory that this process could still take without swapping: the least over the machine and every
    control group with a limit, versions 1 and 2, up the tree. 0 where the machine does not say.
    """
    facts = {key: value.split() for key, _, value in _pairs(root / "proc/meminfo", ":")}
    kibibytes = facts.get("MemAvailable") or facts.get("MemFree") or ["0"]
    available = int(kibibytes[0]) * 1024
    for folder in _groups(root, "memory"):
        for name in _MEMORY_LIMITS:
            if (limit := _number(folder / name)) is not None:
                available = min(available, max(0, limit - _used(folder)))
    return available


def threads(
    option: int | None, *, root: Path = ROOT, affinity: int | None = None, environ: Mapping[str, str] = os.environ
) -> Granted:
    """How many compute threads to use, and why; both are logged. `option` is the user's --threads and wins. From
    `MANY_CORES` physical cores on, one thread each: a core's second hardware thread shares what the first waits for.
    """
    granted = granted_cores(root, affinity)
    cores = len(_cores(root, os.sched_getaffinity(0) if affinity is None else range(affinity)))
    if MANY_CORES <= cores < granted.count:
        granted = Granted(cores, f"{cores} physical cores; {granted.reason}")
    chosen = granted if option is None else Granted(option, f"--threads; {granted.count} granted ({granted.reason})")
    log.info("%d compute threads: %s", chosen.count, chosen.reason)
    if "OMP_NUM_THREADS" in environ:
        log.info("OMP_NUM_THREADS=%s is ignored; use --threads", environ["OMP_NUM_THREADS"])
    return chosen


def thread_nodes(
    count: int, *, root: Path = ROOT, processors: Iterable[int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """For each of `count` threads the processors of one node of memory that it should keep to, in shares by the nodes'
    physical cores, consecutive threads together; empty where there is one node, and the system's scheduler knows best.
    `processors`: those this process may use, default: asks the kernel.
    """
    cores = _cores(root, os.sched_getaffinity(0) if processors is None else processors)
    nodes = dict.fromkeys(node for node, _ in cores)
    if len(nodes) < 2:
        return ()
    on = {node: tuple(sorted(p for (n, _), core in cores.items() if n == node for p in core)) for node in nodes}
    by_core = [on[node] for node, _ in cores]
    return tuple(by_core[thread * len(by_core) // count] for thread in range(count))


def _cores(root: Path, processors: Iterable[int]) -> dict[tuple[int, int], list[int]]:
    """(node of memory, first hardware thread) of each physical core, in order, to those of its `processors` that may be
    used. A processor of which the machine says nothing is a core of its own, on node 0.
    """
    node_of = {
        processor: int(folder.name.removeprefix("node"))
        for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
        for processor in _listed(_text(folder / "cpulist"))
    }
    cores: dict[tuple[int, int], list[int]] = {}
    for processor in sorted(processors):
        siblings = _listed(_text(root / f"sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list"))
        key = node_of.get(processor, 0), min(siblings, default=processor)
        cores.setdefault(key, []).append(processor)
    return dict(sorted(cores.items()))


def _listed(text: str) -> list[int]:
    """The numbers of a list like 0-3,8; empty where it is none."""
    ranges = [part.partition("-") for part in text.strip().split(",")]
    if not all(first.isdigit() and (last or first).isdigit() for first, _, last in ranges):
        return []
    return [number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)]


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes of this process's memory that are in RAM, and how many of them lie on huge pages."""

    total: int
    huge_anonymous: int
    """Of memory of its own."""
    huge_file: int
    """Of mapped files, which other processes may share."""
    anonymous: int = 0
    """Of its own, on pages of any size: what cannot be had back by dropping clean cache."""

    def __str__(self) -> str:
        return (
            f"{self.total / 1e6:.0f} MB resident, of it on huge pages {self.huge_anonymous / 1e6:.0f} MB of its own "
            f"and {self.huge_file / 1e6:.0f} MB of files"
        )


def resident(root: Path = ROOT) -> Resident | None:
    """What the process got; None where the system does not say."""
    facts = {key: value.split() for key, _, value in _pairs(root / "proc/self/smaps_rollup", ":")}
    if "Rss" not in facts:
        return None
    names = ("Rss", "AnonHugePages", "FilePmdMapped", "Anonymous")
    return Resident(*(int(facts.get(name, ["0"])[0]) * 1024 for name in names))


def grants_huge_memory(root: Path = ROOT) -> bool:
    """Whether memory that asks for huge pages may get them."""
    enabled = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    return bool(enabled) and "[never]" not in enabled


# -- control groups ----------------------------------------------------------------------------------------------------

_MEMORY_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
_VERSION_2 = ("",)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control groups that may limit `controller`, from its own up to the mounted root,
    in each hierarchy that is mounted: version 2's, and version 1's that carries the controller (cgroups(7)).
    """
    for controllers, path in _memberships(root):
        if controllers and controller not in controllers.split(","):
            continue
        for mount_root, mount_point, carries in _mounts(root):
            if controller in carries if controllers else carries == _VERSION_2:
                top = root / mount_point.lstrip("/")
                folder = top / _inside(path, mount_root)
                yield folder
                yield from (parent for parent in folder.parents if parent.is_relative_to(top))


def _memberships(root: Path) -> list[tuple[str, str]]:
    """(controllers, path) of every line of /proc/self/cgroup; version 2's controllers are ""."""
    lines = (line.split(":", 2) for line in _text(root / "proc/self/cgroup").splitlines())
    return [(line[1], line[2]) for line in lines if len(line) == 3]


def _mounts(root: Path) -> list[tuple[str, str, tuple[str, ...]]]:
    """(root inside the hierarchy, mount point, controllers or _VERSION_2) of every mounted hierarchy."""
    found: list[tuple[str, str, tuple[str, ...]]] = []
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        mount, kind = before.split(), after.split()
        if len(mount) >= 5 and kind[:1] == ["cgroup2"]:
            found.append((mount[3], mount[4], _VERSION_2))
        elif len(mount) >= 5 and kind[:1] == ["cgroup"]:
            found.append((mount[3], mount[4], tuple(kind[-1].split(","))))
    return found


def _inside(path: str, mount_root: str) -> str:
    """Where a group stands below its mount. A container without a namespace of its own sees the host's path, and a
    mount of just its own group; a path outside the mount's root is the mount itself.
    """
    if ".." in path.split("/"):
        return ""
    if mount_root == "/":
        return path.lstrip("/")
    return path[len(mount_root) :].lstrip("/") if (path + "/").startswith(mount_root + "/") else ""


def _quota(folder: Path) -> float | None:
    """Cores' worth of CPU time that a group may use; None: no limit."""
    quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
    if not quota:
        quota, period = _text(folder / "cpu.cfs_quota_us").strip(), _text(folder / "cpu.cfs_period_us").strip()
    if not quota.isdigit() or not period.isdigit() or not int(quota) or not int(period):
        return None
    return int(quota) / int(period)


def _used(folder: Path) -> int:
    """Bytes a group holds that cannot be had back by dropping clean cache; 0 where it does not say."""
    used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
    stat = {key: value for key, _, value in _pairs(folder / "memory.stat", " ")}
    files = ("inactive_file", "active_file")  # in memory only to be read again
    return used - sum(int(stat.get(f"total_{name}") or stat.get(name) or 0) for name in files)


# -- files -------------------------------------------------------------------------------------------------------------


def _pairs(path: Path, separator: str) -> Iterator[tuple[str, str, str]]:
    """(before, separator, after) of each line of a file."""
    return (line.partition(separator) for line in _text(path).splitlines())


def _number(path: Path) -> int | None:
    """The whole number that a file holds; None where there is no such file, or it says "max"."""
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    """A file's text; "" where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
