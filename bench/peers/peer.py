"""What every engine in the comparison is to the one who measures, and what running a program of theirs takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.peers.lines import START, Line

ROOT = Path(__file__).parents[2]
LIMIT_S = 1800
"""Seconds after which a program of an engine is ended."""


class PeerError(Exception):
    """The engine cannot run this model, or these lines of it; the message says why."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is the same for all engines."""

    threads: int
    isa: str | None
    """avx2: no newer instructions; None: all that the machine has."""


class Peer(Protocol):
    """One engine. Each run is a process of its own that ends before the next begins: nothing of it stays behind."""

    name: str
    """As the table's head shows it."""

    def version(self) -> str:
        """Of the engine; PeerError where it is not installed."""

    def prepare(self, model: Path, lines: Sequence[Line]) -> str:
        """Before the counted runs: fill the caches, choose options where there is a choice. What was chosen, in words.
        PeerError where the engine cannot run the model."""

    def measure(self, model: Path, lines: Sequence[Line]) -> dict[str, float]:
        """The figure of each line, by its name, of one run."""


def run(command: Sequence[str], env: dict[str, str] | None = None) -> str:
    """Standard output of a program; PeerError, with the end of what it said, where it fails."""
    try:
        done = subprocess.run(
            command, env=dict(os.environ) | (env or {}), capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except FileNotFoundError:
        raise PeerError(f"{command[0]} is not there") from None
    except subprocess.TimeoutExpired:
        raise PeerError(f"{Path(command[0]).name} took over {LIMIT_S} s") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise PeerError(f"{Path(command[0]).name}: {said[-1] if said else f'exit code {done.returncode}'}")
    return done.stdout


def installed_version(python: str, package: str) -> str:
    """Of a package in another interpreter's environment; PeerError where it is not there."""
    return run([python, "-c", f"import importlib.metadata as m; print(m.version({package!r}))"]).strip()


def run_engine(
    python: str, module: str, model: Path, lines: Sequence[Line], setting: Setting, env: dict[str, str] | None = None
) -> dict[str, float]:
    """Runs `python -m bench.peers.MODULE`, which answers with `answer`, and adds the time to its first token."""
    command = [python, "-m", f"bench.peers.{module}", str(model), "--threads", str(setting.threads)]
    command += ["--lines", ",".join(line.name for line in lines if line is not START)]
    command += ["--isa", setting.isa] if setting.isa else []
    own = os.environ.get("PYTHONPATH") if python == sys.executable else None
    path = os.pathsep.join(filter(None, (str(ROOT), own)))
    begin = time.monotonic()
    printed = run(command, {"PYTHONPATH": path} | (env or {})).splitlines()
    said: dict[str, Any] = json.loads(next(line for line in reversed(printed) if line.startswith("{")))
    figures = dict(said["figures"])
    if START in lines:
        figures[START.name] = said["first_token_at"] - begin
    return figures
