"""Compute threads and processes: forks, and what the system does not grant."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace import LLM, OptionError, SamplingParams, native
from tests.native.calling import packed, stored

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


def run(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60)


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
    assert allowed(int(worker)) == str(mine[-1])
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
