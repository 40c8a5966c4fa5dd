"""Compute threads and processes: how many are started (case O1), forks, and what the system does not grant."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, OptionError, SamplingParams, hardware, native
from tests.models.tiny import tiny_checkpoint
from tests.native.calling import packed, stored
from tests.pure.test_hardware import V1_CPU, tree, v2

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

FORK = """
import os, sys, time
from headrace import LLM, SamplingParams
llm = LLM(sys.argv[1], context=256, threads=3, pool_bytes=1 << 24)
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
time.sleep(0.05)  # the compute threads are asleep
child = os.fork()
if child == 0:
    if sys.argv[2] == "exit":
        sys.exit(0)
    with llm:
        print(llm.generate("Once upon a time", params)[0].outputs[0].token_ids, flush=True)
    sys.exit(0)
print("ended", os.waitpid(child, 0)[1], flush=True)
print(llm.generate("Once upon a time", params)[0].outputs[0].token_ids, flush=True)
llm.close()
"""


def run(code: str, *args: str, before: tuple[str, ...] = (), **env: str) -> subprocess.CompletedProcess[str]:
    """`before`: the command that starts it."""
    command = [*before, sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | env)


# ---- case O1


COUNTED = """
import json, logging, os, sys, time
from pathlib import Path
if len(sys.argv) > 2:  # a control group to be in
    Path(sys.argv[2], "cgroup.procs").write_text(str(os.getpid()))
from headrace import LLM, SamplingParams, native
def tasks():
    return set(os.listdir("/proc/self/task"))
def ticks(ids):  # of CPU time that they have had
    stats = [Path(f"/proc/self/task/{i}/stat").read_text().rpartition(")")[2].split() for i in ids]
    return sum(int(s[11]) + int(s[12]) for s in stats)
def throttled():
    stat = Path(sys.argv[2], "cpu.stat").read_text() if len(sys.argv) > 2 else ""
    return int(dict(line.split() for line in stat.splitlines()).get("nr_throttled", 0))
teams, Threads = [], native.Threads
def counted(count, nodes):
    before = tasks()
    made = Threads(count, nodes)
    teams.append(tasks() - before)
    return made
native.Threads = counted
logging.basicConfig(level=logging.INFO, format="%(message)s")
with LLM(sys.argv[1], context=1024, pool_bytes=1 << 24, weight_cache=False) as llm:
    stopped = throttled()
    llm.generate([[7] * 500] * 16, SamplingParams(temperature=0, max_tokens=120, ignore_eos=True))
    stopped = throttled() - stopped
    time.sleep(0.05)
    before = ticks(teams[0])
    time.sleep(0.4)
    print(json.dumps({
        "threads": llm.model.threads, "started": [len(team) for team in teams],
        "idle_ticks": ticks(teams[0]) - before, "throttled": stopped,
    }))
"""


def started(model: Path, *args: str, before: tuple[str, ...] = ()) -> tuple[dict[str, Any], str]:
    """What an engine with default options says of its threads, in a process of its own, and what it logged."""
    done = run(COUNTED, str(model), *args, before=before, OMP_NUM_THREADS="7")
    assert done.returncode == 0, done.stderr
    assert "OMP_NUM_THREADS=7 is ignored; use --threads\n" in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found, done.stderr


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("threads"), "llama", max_position_embeddings=1024)


@pytest.mark.skipif(shutil.which("taskset") is None, reason="there is no taskset here (package util-linux)")
@pytest.mark.parametrize("count", [1, 2])
def test_o1_under_taskset(count: int, tiny: Path) -> None:
    """The caller is one of the threads, and none is held back. The others sleep when nothing is asked."""
    own = sorted(os.sched_getaffinity(0))
    if len(own) < count:
        pytest.skip(f"this process may use {len(own)} core only")
    found, logged = started(tiny, before=("taskset", "-c", ",".join(map(str, own[:count]))))
    assert found["started"] == [found["threads"] - 1]
    assert f"{found['threads']} compute threads: " in logged
    if "compute threads: CPU quota" not in logged:
        assert found["threads"] == count
    assert found["idle_ticks"] <= 1


def version_1(root: Path, quota: str) -> Path:
    group = "sys/fs/cgroup/cpu,cpuacct/docker/one"
    quota, period = quota.split()
    return tree(
        root,
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/docker/one",
            "proc/self/mountinfo": V1_CPU,
            f"{group}/cpu.cfs_quota_us": quota,
            f"{group}/cpu.cfs_period_us": period,
        },
    )


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("quota", "option", "count"),
    [
        ("150000 100000", None, 1),  # CPUQuota=150%
        ("200000 100000", None, 2),  # docker run --cpus=2
        ("390000 100000", None, 3),
        ("50000 100000", None, 1),
        ("150000 100000", 4, 4),  # --threads wins
    ],
)
def test_o1_under_a_made_up_quota(
    version: int,
    quota: str,
    option: int | None,
    count: int,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The native team has as many threads as the control group grants of a machine of 8."""
    root = version_1(tmp_path, quota) if version == 1 else v2(tmp_path, "/app", {"app/cpu.max": quota})
    monkeypatch.setattr("headrace.engine.build.threads", partial(hardware.threads, root=root, affinity=8))
    teams: list[int] = []
    real = native.Threads
    monkeypatch.setattr(native, "Threads", lambda count, nodes: (teams.append(count), real(count, nodes))[1])
    with LLM(tiny, threads=option, pool_bytes=1 << 22) as llm:
        assert teams == [llm.model.threads] == [count]
        assert llm.generate([[5, 6]], GREEDY)[0].outputs[0].finish_reason == "length"


@pytest.fixture
def quota_of_150_percent() -> Iterator[Path]:
    """A control group of this machine, version 1 or 2, below our own."""
    for folder in hardware._groups(hardware.ROOT, "cpu"):
        group = folder / f"headrace-test-{os.getpid()}"
        with suppress(OSError):
            group.mkdir()
            try:
                if (group / "cpu.max").exists():
                    (group / "cpu.max").write_text("150000 100000")
                else:
                    (group / "cpu.cfs_period_us").write_text("100000")
                    (group / "cpu.cfs_quota_us").write_text("150000")
            except OSError:
                group.rmdir()
                continue
            break
    else:
        pytest.skip("no control group with a CPU quota can be made here: that takes root and a cpu controller")
    yield group
    group.rmdir()


def test_o1_under_a_real_quota(quota_of_150_percent: Path, tiny: Path) -> None:
    """One thread and a half are granted: one is started, and the scheduler hardly ever has to stop it."""
    found, logged = started(tiny, str(quota_of_150_percent))
    assert (found["threads"], found["started"]) == (1, [0])
    allowed = len(os.sched_getaffinity(0))
    if allowed > 1:
        assert f"1 compute threads: CPU quota of 1.5 cores, {allowed} in the process's affinity\n" in logged
    assert found["throttled"] <= 1


# ---- forks


def test_a_child_that_only_ends_ends(smollm2: Path) -> None:
    done = run(FORK, str(smollm2), "exit")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ended 0\n")
    assert done.stderr == ""


def test_a_child_has_threads_of_its_own(smollm2: Path) -> None:
    """Loaded before the fork and used in both: the same answer, and both end cleanly."""
    done = run(FORK, str(smollm2), "generate")
    assert done.returncode == 0, done.stderr
    of_child, ended, of_parent = done.stdout.splitlines()
    assert ended == "ended 0"
    assert of_child == of_parent
    assert done.stderr == ""


def test_a_childs_threads_do_pieces() -> None:
    """Packing in a child after the parent's threads have worked: nothing waits for threads that are not there."""
    threads = native.Threads(4)
    weight = stored(np.random.default_rng(1).standard_normal((500, 64), np.float32))
    want = packed(weight, threads).line(499).tobytes()
    child = os.fork()
    if child == 0:
        os._exit(0 if packed(weight, threads).line(499).tobytes() == want else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("count", [0, -1, 1025, 2**30])
def test_counts_that_cannot_be(count: int) -> None:
    with pytest.raises(ValueError, match="threads must be 1 to 1024"):
        native.Threads(count)


@pytest.mark.parametrize("count", [1025, 10**6, 2**40])
def test_too_many_threads_are_refused(smollm2: Path, count: int) -> None:
    with pytest.raises(OptionError, match=f"threads must be at most 1024, not {count}"):
        LLM(smollm2, threads=count)


REFUSED = """
import resource, sys
from headrace import LLM, OptionError
soft = 400 << 20  # bytes of address space beyond what is taken: room for the model, not for 1,000 stacks
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + soft, resource.RLIM_INFINITY))
try:
    LLM(sys.argv[1], context=64, threads=1000, pool_bytes=1 << 22, weight_cache=False)
except OptionError as error:
    print(error)
"""


def test_threads_that_the_system_refuses_are_an_error(smollm2: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_STACK)[0] >= 1 << 20
    done = run(REFUSED, str(smollm2))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the system has no 1000 threads to give"), done.stdout


# ---- several nodes of memory, which no machine at hand has: each processor plays one


def allowed(thread: int) -> str:
    status = Path(f"/proc/self/task/{thread}/status").read_text()
    return next(line.split()[1] for line in status.splitlines() if line.startswith("Cpus_allowed_list"))


def test_threads_keep_to_their_nodes_and_the_caller_is_given_back() -> None:
    mine = sorted(os.sched_getaffinity(0))
    before = set(os.listdir("/proc/self/task"))
    threads = native.Threads(2, [[mine[0]], [mine[-1]]])
    weight = stored(np.random.default_rng(1).standard_normal((500, 64), np.float32))
    want = packed(weight, threads).data().tobytes()
    (worker,) = set(os.listdir("/proc/self/task")) - before
    until = time.monotonic() + 10
    while allowed(int(worker)) != str(mine[-1]):  # it may not have had a core yet
        assert time.monotonic() < until
        time.sleep(0.01)
    assert sorted(os.sched_getaffinity(0)) == mine
    assert want == packed(weight, native.Threads(1)).data().tobytes()


def test_a_place_that_is_not_granted_is_a_wish() -> None:
    threads = native.Threads(2, [[1023], [1023]])
    weight = stored(np.random.default_rng(1).standard_normal((500, 64), np.float32))
    assert packed(weight, threads).line(3).shape == (64,)
    with pytest.raises(ValueError, match="places must be one for each"):
        native.Threads(2, [[0]])


def test_nodes_change_no_answer(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = sorted(os.sched_getaffinity(0))
    answers = []
    for nodes in ((), ((mine[0],), (mine[-1],))):
        monkeypatch.setattr("headrace.program.native_backend.thread_nodes", lambda count, nodes=nodes: nodes)
        with LLM(smollm2, context=128, threads=2, pool_bytes=1 << 24, weight_cache=False) as llm:
            answers.append(llm.generate("Once upon a time", GREEDY)[0].outputs[0].token_ids)
    assert answers[0] == answers[1]
