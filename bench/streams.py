"""Many streams for minutes, some of whose clients leave: does anybody who stays notice, and does everything come back?

    python -m bench.streams MODEL [--streams 200] [--minutes 5] [--leaving 0.2] [--prompt 32] [--answer 128]
                            [--engine thread] [--json OUT.json]

`streams` completions at a time, each on a connection of its own; whoever is through, or has left, begins another. A
share `leaving` closes its connection after a random part of its answer. The load comes from raw sockets, one thread in
this process, whose processor time is told; the server is another process, whose pool holds twice what all streams may
need, so that the prefix cache fills it in the first minutes and memory can be judged. At the end the streams are let
run out, and within a second nothing may run, wait or hold a block. Resident memory is looked at every ten seconds: its
last quarter may not be above its second by more than 1 %. Exits with 1 where something does not hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import selectors
import socket
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.http_load import Load, Stream, bodies
from bench.serving import Facts, Server, files_up, share
from headrace.cache.pool import BLOCK
from headrace.config import Options
from headrace.engine.build import plan_engine
from headrace.loading.resolve import resolve

LOOK_S = 10.0


class Crowd:
    """The streams that are under way, and what became of the others."""

    def __init__(self, asked: Load, leaving: float) -> None:
        self._asked, self._leaving = asked, leaving
        self._choose = random.Random(5)
        self._selector = selectors.DefaultSelector()
        self._bodies = self._endless()
        self.done: list[Stream] = []
        self.left = 0
        self.wrong: list[str] = []
        self.gaps: list[float] = []
        self.firsts: list[float] = []

    def _endless(self) -> Iterator[bytes]:
        for seed in itertools.count(2):
            yield from bodies(dataclasses.replace(self._asked, own_seed=seed))

    def start(self) -> None:
        place = urlsplit(self._asked.url)
        connection = socket.create_connection((place.hostname or "", place.port or 80))
        connection.sendall(next(self._bodies))
        connection.setblocking(False)
        leaves = self._choose.random() < self._leaving
        after = self._choose.randrange(self._asked.answer) if leaves else self._asked.answer + 1
        stream = Stream(connection, time.perf_counter())
        self._selector.register(connection, selectors.EVENT_READ, (stream, after))

    @property
    def there(self) -> int:
        return len(self._selector.get_map())

    def turn(self, wait_s: float) -> int:
        """Take what has come; how many streams have ended or left."""
        over = 0
        for key, _ in self._selector.select(wait_s):
            stream, after = key.data
            data = stream.socket.recv(1 << 16)
            if data:
                stream.take(data, time.perf_counter())
                if len(stream.at) <= after:
                    continue
                self.left += 1
            else:
                self._judge(stream)
            self._selector.unregister(stream.socket)
            stream.socket.close()
            self.gaps.extend(b - a for a, b in itertools.pairwise(stream.at))
            self.firsts.extend(at - stream.begin for at in stream.at[:1])
            over += 1
        return over

    def _judge(self, stream: Stream) -> None:
        told = stream.usage.get("completion_tokens")
        if b" 200 " in stream.status and stream.ended and told == self._asked.answer:
            self.done.append(stream)
        else:
            self.wrong.append(f"{stream.status.decode()}, {told} tokens: {stream.rest[-200:]!r}")


def run(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    asked = Load(server.url, "model", 0, 1000, args.prompt, 0, args.answer)
    crowd, facts = Crowd(asked, args.leaving), [server.facts()]
    begin, cpu, look = time.perf_counter(), time.process_time(), LOOK_S
    for _ in range(args.streams):
        crowd.start()
    while (passed := time.perf_counter() - begin) < 60 * args.minutes:
        for _ in range(crowd.turn(0.1)):
            crowd.start()
        if passed > look:
            facts.append(server.facts())
            look += LOOK_S
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    tokens = server.facts().stats.tokens_out - facts[0].stats.tokens_out
    while crowd.there:
        crowd.turn(1.0)
    return judged(crowd, facts, server, asked) | {
        "seconds": round(seconds, 1),
        "tokens_per_s": round(tokens / seconds, 1),
        "generator_cpu_s": round(cpu, 1),
        "server_cpu_s": round(facts[-1].cpu_s - facts[0].cpu_s, 1),
    }


def judged(crowd: Crowd, facts: list[Facts], server: Server, asked: Load) -> dict[str, Any]:
    time.sleep(1)
    end = server.facts()
    lags = [lag for one in facts[1:] for lag in one.lags]
    memory = [one.memory for one in facts[1:]]
    quarter = max(1, len(memory) // 4)
    grew = statistics.median(memory[-quarter:]) / statistics.median(memory[quarter : 2 * quarter] or memory) - 1
    wrong = crowd.wrong[:10]
    if end.stats.running or end.stats.waiting or end.stats.blocks_used:
        wrong.append(f"a second after the end {end.stats.running} run and {end.stats.blocks_used} blocks are held")
    if (aborts := end.stats.aborts - facts[0].stats.aborts) > crowd.left:
        wrong.append(f"{aborts} requests were ended early, though {crowd.left} clients left")
    if grew > 0.01:
        wrong.append(f"memory grew by {grew:.2%}")
    return {
        "answered": len(crowd.done),
        "left": crowd.left,
        "aborts": aborts,
        "first_token_s": {"p50": round(share(crowd.firsts, 0.5), 3), "p99": round(share(crowd.firsts, 0.99), 3)},
        "gap_ms": {"p50": round(1000 * share(crowd.gaps, 0.5), 1), "p99": round(1000 * share(crowd.gaps, 0.99), 1)},
        "lag_ms": {f"p{p:g}": round(1000 * share(lags, p / 100), 1) for p in (50, 99, 99.9)},
        "memory_mb": [round(memory[0] / 1e6, 1), round(memory[-1] / 1e6, 1)],
        "memory_grew_by": round(grew, 4),
        "wrong": wrong,
    }


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("model")
    for name, default in (("streams", 200), ("prompt", 32), ("answer", 128)):
        ask.add_argument(f"--{name}", type=int, default=default)
    ask.add_argument("--minutes", type=float, default=5)
    ask.add_argument("--leaving", type=float, default=0.2)
    ask.add_argument("--engine", default="thread", choices=["thread", "process"])
    ask.add_argument("--json", type=Path)
    args = ask.parse_args()
    files_up()
    options: dict[str, Any] = {"context": 2048, "past_load": False}
    memory = plan_engine(resolve(args.model), Options.of(**options)).memory
    tokens = 2 * min(args.streams, memory.plan.rows) * (args.prompt + args.answer + BLOCK)
    server = Server(args.model, args.engine, {**options, "pool_bytes": tokens * memory.token})
    try:
        said = run(server, args)
    finally:
        server.close()
    print(json.dumps(said, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(said, indent=1) + "\n")
    raise SystemExit(bool(said["wrong"]))


if __name__ == "__main__":
    main()
