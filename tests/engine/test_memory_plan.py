"""The memory plan with a real model: it is true, the server prints it before it is ready, and too little is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def headrace(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "headrace", *args], capture_output=True, text=True, timeout=120)


def test_the_peak_of_a_full_pool_is_the_plan(smollm2: Path) -> None:
    """With the log-probabilities of every prompt, so that the buffers are used too."""
    bench = [sys.executable, str(ROOT / "bench" / "memory_plan.py"), str(smollm2), "--json", "--prompt-logprobs", "0"]
    for _ in range(2):  # the first may pack the weights
        done = subprocess.run([*bench, "--memory", "340MB", "--context", "1024"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["plan"] <= found["limit"] == 340_000_000
        assert found["pool_used"] > 0.8 * found["pool"]
        assert 0.8 * found["plan"] < found["peak"] <= 1.03 * found["plan"], found


def test_the_server_prints_the_plan_and_then_that_it_is_ready(smollm2: Path) -> None:
    command = [sys.executable, "-m", "headrace", "serve", str(smollm2), "--port", "0", "--memory", "500MB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        ready = server.stdout.readline()
        os.kill(server.pid, signal.SIGTERM)
        told, rest = server.stderr.read(), server.stdout.read()
    assert ready.startswith("ready: http://")
    assert rest == ""
    parts = [line.split("  ")[0] for line in told.splitlines() if " info " not in line]
    assert parts[:8] == [
        "memory", "process", "weights", "buffers", "KV pool", "together", "at once", "past load",
    ]  # fmt: skip
    assert parts[8:] in ([], ["", "proposal"]), "as other tests of this run have asked"
    assert "500.0 MB by the option" in told


def test_show_tells_the_plan_to_people_and_programs(smollm2: Path) -> None:
    people = headrace("show", str(smollm2), "--plan", "--memory", "500MB")
    assert people.stdout.splitlines()[0].startswith("memory        500.0 MB by the option; ")
    programs = headrace("show", str(smollm2), "--plan", "--json", "--memory", "500MB")
    plan = json.loads(programs.stdout)["plan"]
    assert plan["total"] + plan["remains"] == plan["memory"] == 500_000_000
    assert plan["total"] == plan["process"] + plan["weights"] + plan["buffers"] + plan["pool"]


@pytest.mark.parametrize("command", ["run", "serve", "show"])
def test_too_little_is_refused_with_what_would_fit(smollm2: Path, command: str) -> None:
    more = ["hi"] if command == "run" else []
    refused = headrace(
        command, str(smollm2), *more, "--memory", "350MB", *(["--port", "0"] if command == "serve" else [])
    )
    assert (refused.returncode, refused.stdout) == (1, "")
    logged = [line for line in refused.stderr.splitlines() if " info " in line]
    assert refused.stderr.splitlines()[len(logged)].startswith("error: memory is 350MB: beside")
    assert not logged or command == "serve"
    assert "What would fit: context " in refused.stderr
    if command == "run":
        context = refused.stderr.split("What would fit: context ")[1].split()[0]
        options = ["--memory", "350MB", "--context", context, "--max-tokens", "2", "--temperature", "0"]
        assert headrace("run", str(smollm2), "hi", *options).returncode == 0
    wrong = headrace(command, str(smollm2), *more, "--memory", "6G")
    assert wrong.returncode == 2
    assert "6GiB" in wrong.stderr
