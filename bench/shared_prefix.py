"""Requests that share a long prefix, over HTTP: Headrace (its prefix cache on, warm from a folder, off) and peers.

    python -m bench.shared_prefix MODEL.gguf [--rounds 3] [--peer-rounds 1] [--engines headrace,warm,off,llama,vllm]
                                  [--requests 64] [--streams 16] [--shared 1400] [--prompt 20] [--answer 64]
                                  [--threads 2] [--json OUT.json]

Each engine is a server of its own, started for one run and ended after it; in a round each runs once, every second
round in the other order. The load is bench/http_load.py's: token ids, greedy, end tokens ignored, the same for all;
its processor time is reported, since it runs on the same cores. Loading and one warm-up request of other tokens come
before the clock. The warm folder is filled by an uncounted run of the same prefix before the first round; own tokens
are new in every round. Peers as bench/peers/README.md installs them; vLLM serves the bf16 folder of MODEL.

The ideal number of reused tokens is the prefix of every request but the first (of all with a warm folder), once by
tokens and once by whole blocks. Exits with 1 where Headrace reuses less than 99 % of the latter, an answer of any
engine has another number of tokens than asked for, or an engine fails. Peers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.http_load import Load, load, measured
from bench.peers.build_llama_cpp import FOLDER, binaries
from headrace.cache.pool import BLOCK

SLOTS = 8
"""Of llama-server, over one KV buffer."""
KV_GIB = 2
"""vLLM's."""
START_S = 600
STOP_S = 60


@dataclass(frozen=True)
class Engine:
    """How one server is started; `--port` comes after `command`."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    peer: bool = False
    ideal: int = 0
    """Requests whose prefix need not be computed."""


def engines(args: argparse.Namespace, warm: Path) -> dict[str, Engine]:
    """All, by the names of `--engines`."""
    length = args.shared + args.prompt + args.answer
    threads, context = str(args.threads), str(-(-length // 1024) * 1024)
    own = [sys.executable, "-m", "headrace", "serve", str(args.model), "--threads", threads, "--context", context]
    own += ["--served-model-name", "model"]
    llama = [str(binaries("native", FOLDER) / "llama-server"), "-m", str(args.model), "-t", threads]
    llama += ["-np", str(SLOTS), "-kvu", "-c", str(SLOTS * int(context))]
    folder = FOLDER / "bf16" / args.model.stem
    # not `vllm serve`: that asks for the version of a package "vllm", and the one for CPUs has another name
    vllm = [str(FOLDER / "vllm" / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
    vllm += ["--model", str(folder), "--dtype", "bfloat16"]
    vllm += ["--max-model-len", context, "--enable-prefix-caching", "--enable-prompt-tokens-details"]
    vllm += ["--served-model-name", "model", "--host", "127.0.0.1"]
    bound = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{args.threads - 1}", "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB)}
    bound |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    others = args.requests - 1
    return {
        "headrace": Engine("Headrace", own, ideal=others),
        "warm": Engine("Headrace, warm --cache-dir", [*own, "--cache-dir", str(warm)], ideal=args.requests),
        "off": Engine("Headrace, --no-prefix-cache", [*own, "--no-prefix-cache"]),
        "llama": Engine(f"llama-server, {SLOTS} slots", llama, peer=True, ideal=others),
        "vllm": Engine("vLLM CPU (bf16)", vllm, bound, peer=True, ideal=others),
    }


@contextmanager
def served(engine: Engine) -> Iterator[str]:
    """Its address, once it is ready; afterwards it has ended. RuntimeError where it does not start."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url, env = f"http://127.0.0.1:{port}", {**os.environ, **engine.env}
    with tempfile.TemporaryFile() as said:
        server = subprocess.Popen(
            [*engine.command, "--port", str(port)], env=env, stdout=said, stderr=said, start_new_session=True
        )
        try:
            until = time.monotonic() + START_S
            while not healthy(url):
                if server.poll() is not None or time.monotonic() > until:
                    said.seek(0)
                    last = said.read().decode(errors="replace").strip()[-600:]
                    raise RuntimeError(f"{engine.name} did not start: {last}")
                time.sleep(0.2)
            yield url
        finally:
            server.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                server.wait(STOP_S)
            with suppress(ProcessLookupError):  # and whoever it has started
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def one_run(engine: Engine, args: argparse.Namespace, number: int) -> dict[str, Any]:
    with served(engine) as url:
        load(Load(url, requests=1, prompt=256, answer=8, own_seed=-1))  # warm, of other tokens
        asked = Load(url, "model", args.streams, args.requests, args.prompt, args.shared, args.answer, own_seed=number)
        said = measured(asked)
    ideal = {"tokens": engine.ideal * args.shared, "blocks": engine.ideal * (args.shared // BLOCK * BLOCK)}
    return said | {"ideal": ideal}


def table(runs: Mapping[str, list[dict[str, Any]]], requests: int) -> str:
    """Medians; in brackets the least and the most."""
    head = ["", "s until all are answered", "times the first's", "first token p50, s", "p99, s", "prompt tokens reused"]
    head += ["of the ideal by tokens", f"by blocks of {BLOCK}", "generator, CPU s", "answers in full"]
    lines = [f"| {' | '.join(head)} |", "|---" + "|--:" * (len(head) - 1) + "|"]
    first = next(iter(runs.values()), [])
    for name, all_runs in runs.items():
        cells = [name, spread([r["seconds"] for r in all_runs]), f"{seconds(all_runs) / seconds(first):.2f}"]
        cells += [spread([r["first_token_s"][q] for r in all_runs]) for q in ("p50", "p99")]
        ideal, known = all_runs[0]["ideal"], [r["reused_tokens"] for r in all_runs if r["reused_tokens"] is not None]
        reused = min(known, default=None)
        cells += ["not said" if reused is None else f"{reused:,}"]
        cells += ["" if not reused or not ideal[by] else f"{reused / ideal[by]:.1%}" for by in ("tokens", "blocks")]
        cells += [f"{max(r['generator_cpu_s'] for r in all_runs):.2f}"]
        cells += [f"{min(r['answered_in_full'] for r in all_runs)} of {requests}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def seconds(runs: Sequence[dict[str, Any]]) -> float:
    return float(statistics.median(r["seconds"] for r in runs))


def spread(values: Sequence[float]) -> str:
    digits = 1 if statistics.median(values) >= 10 else 2
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def compare(args: argparse.Namespace) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Engine], set[str]]:
    """All runs by the engine's name, in the order of `--engines`, and who failed: one that does is left out from there
    on. Peers that are not installed are left out."""
    with tempfile.TemporaryDirectory(prefix="headrace-warm-") as folder:
        all_engines = engines(args, Path(folder) / "cache")
        chosen = {}
        for name in args.engines.split(","):
            engine = all_engines[name]
            if engine.peer and not Path(engine.command[0]).exists():
                note(f"{engine.name} is not installed: bench/peers/README.md")
            else:
                chosen[name] = engine
        runs: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in chosen.values()}
        if "warm" in chosen:
            note("the warm folder is filled")
            one_run(chosen["warm"], args, -2)
        failed: set[str] = set()
        for number in range(max(args.rounds, args.peer_rounds)):
            for engine in list(chosen.values())[:: -1 if number % 2 else 1]:
                if number >= (args.peer_rounds if engine.peer else args.rounds) or engine.name in failed:
                    continue
                note(f"round {number + 1}: {engine.name}")
                try:
                    runs[engine.name].append(one_run(engine, args, number))
                except (RuntimeError, OSError) as error:
                    note(f"{engine.name} fails: {error}")
                    failed.add(engine.name)
        return {name: found for name, found in runs.items() if found}, chosen, failed


def missing(runs: Mapping[str, list[dict[str, Any]]], args: argparse.Namespace) -> list[str]:
    """What does not hold."""
    said = []
    for name, found in runs.items():
        for run in found:
            if run["answered_in_full"] != args.requests:
                said.append(f"{name}: only {run['answered_in_full']} answers have {args.answer} tokens")
            ideal = run["ideal"]["blocks"]
            if name.startswith("Headrace") and (run["reused_tokens"] or 0) < 0.99 * ideal:
                said.append(f"{name}: {run['reused_tokens']} tokens reused of {ideal}")
    return said


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("model", type=Path)
    for name, default in (("rounds", 3), ("peer-rounds", 1), ("requests", 64), ("streams", 16), ("shared", 1400)):
        ask.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("prompt", 20), ("answer", 64), ("threads", 2)):
        ask.add_argument(f"--{name}", type=int, default=default)
    ask.add_argument(
        "--engines", default="headrace,warm,off,llama,vllm", help="default: %(default)s; the first is 1.00"
    )
    ask.add_argument("--json", type=Path)
    args = ask.parse_args()
    if not args.model.exists():
        ask.error(f"{args.model} is not there")
    runs, chosen, failed = compare(args)
    print(
        f"{args.model.name}: {args.requests} requests, {args.streams} at a time, that share {args.shared:,} tokens, "
        f"{args.prompt} of their own, {args.answer} out; {args.threads} threads\n\n{table(runs, args.requests)}"
    )
    if args.json is not None:
        options = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
        how = {e.name: {"command": list(e.command), "env": dict(e.env)} for e in chosen.values()}
        args.json.write_text(json.dumps({"options": options, "engines": how, "runs": runs}, indent=1) + "\n")
    for wrong in (lacking := missing(runs, args)):
        note(wrong)
    return int(bool(lacking or failed))


if __name__ == "__main__":
    sys.exit(main())
