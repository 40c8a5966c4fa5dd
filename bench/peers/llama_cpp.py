"""llama.cpp, through its own tools: llama-bench, llama-batched-bench, and llama-server for the start.

Flash attention and the repacking of weights are each tried on and off for each line before the counted runs; the best
of the four serves.
"""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.build_llama_cpp import FOLDER, binaries, built_from
from bench.peers.lines import START, Line, prompts
from bench.peers.peer import LIMIT_S, PeerError, Setting, run

SLOT_TOKENS = 256
"""Context of each stream; llama.cpp rounds up to this."""


@dataclass(frozen=True, slots=True)
class Choice:
    flash_attention: bool
    repack: bool

    def __str__(self) -> str:
        on = {True: "on", False: "off"}
        return f"flash attention {on[self.flash_attention]}, repack {on[self.repack]}"


CHOICES = tuple(itertools.starmap(Choice, itertools.product((False, True), repeat=2)))


class LlamaCpp:
    name = "llama.cpp"

    def __init__(self, setting: Setting, folder: Path = FOLDER) -> None:
        self.setting = setting
        self.bin = binaries(setting.isa or "native", folder)
        self._chosen: dict[tuple[Path, str], Choice] = {}
        self._folder = folder

    def version(self) -> str:
        try:
            return built_from(self.setting.isa or "native", self._folder)
        except OSError:
            raise PeerError(f"not built in {self.bin}: see build_llama_cpp.py") from None

    def prepare(self, model: Path, lines: Sequence[Line]) -> str:
        if model.is_dir():
            raise PeerError("it reads no safetensors")
        said = []
        for line in lines:
            if line is START:
                self._start(model)
                said.append("start: llama-server without its warm-up, else default options")
                continue
            tried = {choice: self._speed(model, line, choice) for choice in CHOICES}
            best = max(CHOICES, key=tried.__getitem__)
            self._chosen[model, line.name] = best
            rates = ", ".join(f"{rate:.1f} ({choice})" for choice, rate in tried.items())
            said.append(f"{line.name}: {best}; tried: {rates}")
        return "; ".join(said)

    def measure(self, model: Path, lines: Sequence[Line]) -> dict[str, float]:
        return {
            line.name: self._start(model) if line is START else self._speed(model, line, self._chosen[model, line.name])
            for line in lines
        }

    def _speed(self, model: Path, line: Line, choice: Choice) -> float:
        return (self._one if line.streams == 1 else self._many)(model, line, choice)

    def _one(self, model: Path, line: Line, choice: Choice) -> float:
        """llama-bench: prompts alone, or decoding from an empty context; it warms up by itself."""
        work = ("-p", "0", "-n", str(line.new)) if line.new > 1 else ("-p", str(line.prompt), "-n", "0")
        options = ("-fa", str(int(choice.flash_attention)), "--repack", str(int(choice.repack)))
        command = (str(self.bin / "llama-bench"), "-m", str(model), "-t", str(self.setting.threads), "-r", "1")
        return float(_json(run((*command, *work, *options, "-o", "json")))[0]["avg_ts"])

    def _many(self, model: Path, line: Line, choice: Choice) -> float:
        """llama-batched-bench: all prompts, then decoding of all streams in step; the latter's rate."""
        command = [str(self.bin / "llama-batched-bench"), "-m", str(model), "-t", str(self.setting.threads)]
        command += ["-c", str(SLOT_TOKENS * line.streams), "-fa", "on" if choice.flash_attention else "off"]
        command += ["-npp", str(line.prompt), "-ntg", str(line.new), "-npl", str(line.streams)]
        command += ["--output-format", "jsonl", "--repack" if choice.repack else "--no-repack"]
        lines = [text for text in run(command).splitlines() if text.startswith("{")]
        return float(_json(lines[-1])["speed_tg"])

    def _start(self, model: Path) -> float:
        """Seconds from the start of llama-server to the answer of a request for one token."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [str(self.bin / "llama-server"), "-m", str(model), "-t", str(self.setting.threads)]
        command += ["-c", "1024", "--no-warmup", "--host", "127.0.0.1", "--port", str(port)]
        body = json.dumps({"prompt": prompts(START)[0], "n_predict": 1}).encode()
        begin = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
            try:
                while server.poll() is None and time.monotonic() < begin + LIMIT_S:
                    if _answered(f"http://127.0.0.1:{port}/completion", body):
                        return time.monotonic() - begin
                    time.sleep(0.01)
            finally:
                server.kill()
        raise PeerError("llama-server ended before it answered")


def _answered(url: str, body: bytes) -> bool:
    """Whether the server has loaded its model and answers; it refuses the connection, or the request, until then."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})) as answer:
            return bool(answer.read())
    except (urllib.error.URLError, ConnectionError):
        return False


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise PeerError(f"not JSON: {text[:80]!r}") from None
