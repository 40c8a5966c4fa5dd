"""A server in a process of its own, over the real engine with a scripted executor that can be told to fail.

As a program: `python -m tests.serve.server_process FOLDER PORT OPTIONS-AS-JSON`. The engine fails in its next step when
FOLDER holds a file `raise`, its thread ends without a word where it is called `vanish`; the file is taken away then.
A step that finds `long` takes it away, and `LONG_S`. `fast` makes steps as short as they can be, `slow` and `broken`
are about the next time that the model is loaded, and with `compiles` grammars take a minute from then on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
STEP_S = 0.03
LONG_S = 3.0
ANSWER = 400
"""Tokens of an answer."""


class Process:
    """`with Process(folder) as process` starts it; it is killed where it still runs at the end."""

    def __init__(self, folder: Path, port: int = 0, **options: Any) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "tests.serve.server_process", str(folder), str(port), json.dumps(options)]
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        self.popen = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )

    def url(self) -> str:
        """Once it is ready."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, f"the server ended before it was ready: {self.ended(10)[2]}"
        return line.split()[1].removesuffix("/v1")

    def fail(self, how: str = "raise") -> None:
        (self.folder / how).touch()

    def signal(self, sig: int = signal.SIGTERM) -> None:
        self.popen.send_signal(sig)

    def ended(self, seconds: float) -> tuple[int, list[dict[str, Any]], str]:
        """Exit code, the log's lines as JSON, and what else stands on standard error."""
        _, err = self.popen.communicate(timeout=seconds)
        lines = err.splitlines()
        told = [json.loads(line) for line in lines if line.startswith("{")]
        return self.popen.returncode, told, "\n".join(line for line in lines if not line.startswith("{"))

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *about: object) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.communicate()


def status(url: str, path: str = "/health") -> int:
    """Of an answer; 0 where there is none."""
    try:
        return httpx.get(url + path, timeout=5).status_code
    except httpx.HTTPError:
        return 0


def main(arguments: Sequence[str]) -> None:
    from headrace.engine import async_llm
    from headrace.errors import HeadraceError
    from headrace.execute.plan import Plan, Result
    from headrace.serve.app import ending_in_time, run
    from headrace.serve.logs import logging_to
    from headrace.serve.options import ServerOptions
    from tests.serve.fake_llm import FakeLLM, Script
    from tests.serve.test_engine_path import Scripted, loaded

    folder, port = Path(arguments[0]), int(arguments[1])
    options = ServerOptions(**{"log_format": "json", **json.loads(arguments[2])})
    fake = FakeLLM()
    fake.script = lambda prompt, choice: Script([120] * ANSWER)

    class Fails(Scripted):
        engine: Any = None

        def run(self, plan: Plan, masks: Any = None) -> Result:
            if not (folder / "fast").exists():
                time.sleep(STEP_S)
            if (file := folder / "long").exists():
                file.unlink()
                time.sleep(LONG_S)
            for how in ("raise", "vanish"):
                if (file := folder / how).exists():
                    file.unlink()
                    if how == "vanish":
                        self.engine._die = lambda error: self.engine.__dict__.pop("_die")
                    raise RuntimeError("injected")
            return super().run(plan, masks)

    def scripted(model: Any, *, deliver: Any, **_: Any) -> Any:
        if (folder / "slow").exists():
            time.sleep(60)
        if (folder / "broken").exists():
            raise HeadraceError("no such model")
        executor = Fails(fake)
        made = loaded(fake, deliver, executor=executor, rows=8, budget=32)
        executor.engine = made._engine
        if (folder / "compiles").exists():
            made._grammars = SimpleNamespace(compiled=lambda grammar: time.sleep(60))  # type: ignore[assignment]
        return made

    async_llm.load = scripted
    try:
        with ending_in_time(), logging_to(options):
            run(lambda: async_llm.AsyncLLM("scripted"), host="127.0.0.1", port=port, options=options)
    except HeadraceError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
