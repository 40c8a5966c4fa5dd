"""The machine's own ceilings: machine.cpp, compiled by the system's compiler and run as often as the engines are."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.peer import Setting, run

SOURCE = Path(__file__).with_name("machine.cpp")
CACHED = 128 << 20
"""Weights of up to so many bytes are held to the speed of reading the small buffer."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Medians of the runs."""

    read_1gb: float
    """Bytes per second from a buffer of 1 GiB."""
    read_90mb: float
    int8: float
    """int8 multiplications, added up in int32, per second."""
    int8_loop: str
    """What they were done with."""
    float32: float
    """Fused multiply-adds per second."""

    def read(self, size: int) -> float:
        """Bytes per second of reading `size` bytes again and again."""
        return self.read_90mb if size <= CACHED else self.read_1gb


class Ceilings:
    """The program, compiled, and what it said so far."""

    def __init__(self, setting: Setting) -> None:
        self._threads = str(setting.threads)
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-machine-")
        self._program = str(Path(self._folder.name) / "machine")
        self.runs: list[dict[str, Any]] = []
        compiler = os.environ.get("CXX", "c++")
        arch = "x86-64-v3" if setting.isa == "avx2" else "native"
        run([compiler, "-O3", "-std=c++17", f"-march={arch}", "-pthread", str(SOURCE), "-o", self._program])

    def measure(self) -> None:
        self.runs.append(json.loads(run([self._program, self._threads])))

    def machine(self) -> Machine:
        """Needs a run."""
        columns = {name: statistics.median(r[name] for r in self.runs) for name in ("read_1gb", "read_90mb", "int8")}
        float32 = statistics.median(r["float32"] for r in self.runs)
        return Machine(**columns, int8_loop=self.runs[0]["int8_loop"], float32=float32)


def processor() -> str:
    """The processor's name as Linux gives it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
