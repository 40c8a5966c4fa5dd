"""Bodies without end against a live server with a real engine: no 5xx, no hang, and a plain request is answered as at
the beginning after every thousand. `make fuzz-http` runs it; schemathesis needs `.[fuzz]`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.http_bodies import CHAT, EMBEDDINGS, PATHS, PLAIN, WAYS, any_raw, problem_with
from tests.models.tiny import tiny_checkpoint

HANG_S = 10
EVERY = 1000
ASKED = {
    CHAT: {**PLAIN[CHAT], "temperature": 0, "max_tokens": 8, "ignore_eos": True},
    EMBEDDINGS: PLAIN[EMBEDDINGS],
}
"""What is asked again and again; the answers stay the same."""


@contextmanager
def served(model: str | None) -> Iterator[tuple[int, int]]:
    """(port, process) of `headrace serve`, by default of a tiny random model."""
    with tempfile.TemporaryDirectory() as folder:
        path = model or str(tiny_checkpoint(Path(folder), "llama", max_position_embeddings=128))
        command = [sys.executable, "-m", "headrace", "serve", path, "--port", "0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            line = next((line for line in process.stdout if line.startswith("ready: ")), None)
            if line is None:
                raise SystemExit("the server did not start")
            yield int(line.split()[1].removesuffix("/v1").rpartition(":")[2]), process.pid
        finally:
            process.terminate()
            process.wait(30)


@dataclass
class Client:
    """One connection, kept alive."""

    port: int
    http: http.client.HTTPConnection = field(init=False)

    def __post_init__(self) -> None:
        self.http = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)

    def post(self, path: str, raw: bytes) -> tuple[int, str, bytes]:
        self.http.request("POST", path, raw, {"Content-Type": "application/json"})
        response = self.http.getresponse()
        content = response.read()
        if response.will_close:
            self.http.close()
        return response.status, response.headers.get("Content-Type", ""), content

    def leave(self, path: str, raw: bytes, rng: random.Random) -> None:
        """Send a part of a body, or all, and go."""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", self.port), HANG_S) as one:
            one.sendall(head.encode() + raw[: rng.randrange(len(raw) + 1)])


def some(port: int, seed: str, count: int) -> tuple[Counter[str], list[str]]:
    """So many bodies, one after the other: how they were answered, and what was wrong."""
    rng, client = random.Random(seed), Client(port)
    seen: Counter[str] = Counter()
    wrong: list[str] = []
    for _ in range(count):
        path = rng.choice(PATHS)
        raw = any_raw(rng, path, rng.choice(WAYS))
        if rng.random() < 0.01:
            client.leave(path, raw, rng)
            seen["left"] += 1
            continue
        begun = time.monotonic()
        try:
            status, kind, content = client.post(path, raw)
        except (OSError, http.client.HTTPException) as error:
            wrong.append(f"{path} after {time.monotonic() - begun:.1f} s: {error!r}: {raw[:2000]!r}")
            client = Client(port)
            continue
        seen[str(status)] += 1
        if (what := problem_with(path, status, kind, content)) is not None:
            wrong.append(f"{path}: {what}: {raw[:2000]!r}")
    client.http.close()
    return seen, wrong


def answers(port: int) -> list[object]:
    """To what is always asked, without what differs each time."""
    client, out = Client(port), []
    for path, body in ASKED.items():
        status, _, content = client.post(path, json.dumps(body).encode())
        if status != 200:
            raise SystemExit(f"a plain request got {status}: {content[:500]!r}")
        answer = json.loads(content)
        choices = answer.get("choices")
        out.append([{k: v for k, v in c.items() if k != "seed"} for c in choices] if choices else answer["data"])
    client.http.close()
    return out


def resident_mib(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4 // 1024


def by_bodies(port: int, process: int, *, count: int, seed: int, connections: int) -> Counter[str]:
    """How so many bodies of our own were answered; SystemExit tells what was wrong."""
    seen: Counter[str] = Counter()
    begun, first = time.monotonic(), answers(port)
    with ThreadPoolExecutor(connections) as pool:
        for thousand in range(count // EVERY):
            seeds = [f"{seed} {thousand} {i}" for i in range(connections)]
            at = f"seed {seed}, thousand {thousand}"
            for counts, wrong in pool.map(lambda one: some(port, one, EVERY // connections), seeds):
                seen += counts
                if wrong:
                    raise SystemExit("\n".join([f"{len(wrong)} wrong, {at}:", *wrong]))
            if answers(port) != first:
                raise SystemExit(f"a plain request is answered otherwise, {at}")
            if (thousand + 1) % 10 == 0:
                spent, memory = time.monotonic() - begun, resident_mib(process)
                print(f"{(thousand + 1) * EVERY} bodies, {spent:.0f} s, {memory} MiB", flush=True)
    return seen


def by_document(port: int, *, examples: int, seed: int) -> int:
    """The exit status of schemathesis on our own document."""
    where = f"http://127.0.0.1:{port}/openapi.json"
    how = ["--max-examples", str(examples), "--seed", str(seed), "--request-timeout", str(HANG_S)]
    quietly = ["--suppress-health-check", "all", "--warnings", "off"]
    config = str(Path(__file__).with_name("schemathesis.toml"))
    return subprocess.run(
        ["schemathesis", "--config-file", config, "run", where, *how, *quietly], check=False
    ).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="by default a tiny random one")
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--examples", type=int, default=500, help="of schemathesis, for each endpoint; 0: without it")
    options = parser.parse_args()
    with served(options.model) as (port, process):
        seen = by_bodies(port, process, count=options.count, seed=options.seed, connections=options.connections)
        print(f"nothing wrong with {options.count} bodies; answers: {dict(sorted(seen.items()))}", flush=True)
        if options.examples and by_document(port, examples=options.examples, seed=options.seed):
            raise SystemExit("schemathesis found something")
        answers(port)


if __name__ == "__main__":
    main()
