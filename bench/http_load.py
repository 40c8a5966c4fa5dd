"""Streams over HTTP from one light process: raw sockets, one thread, its own CPU time reported.

    python bench/http_load.py http://127.0.0.1:8000 [--model NAME] [--streams 16] [--requests 64] [--prompt 32]
                              [--shared 0] [--answer 128] [--json]

`requests` completions of `answer` tokens, `streams` at a time, each on a connection of its own, greedy, end tokens
ignored. Prompts are token ids: the first `shared` the same for all, `prompt` others. Speaks what OpenAI's completions
are on every server: one event for each token, or for a few.
"""

from __future__ import annotations

import argparse
import json
import random
import selectors
import socket
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Stream:
    """One request under way."""

    socket: socket.socket
    begin: float
    rest: bytes = b""
    status: bytes = b""
    at: list[float] = field(default_factory=list)
    """When each event with text came, in seconds."""
    ended: bool = False

    def take(self, data: bytes, now: float) -> None:
        if not self.status:
            self.status = data.split(b"\r\n", 1)[0]
        lines = (self.rest + data).split(b"\n")
        self.rest = lines.pop()
        for line in lines:
            if line.startswith(b"data: [DONE]"):
                self.ended = True
            elif line.startswith(b"data: ") and b'"text"' in line:
                self.at.append(now)


def bodies(args: argparse.Namespace) -> Iterator[bytes]:
    """The requests to come, as they go over the wire."""
    choose = random.Random(1)
    shared = [choose.randrange(100, 20_000) for _ in range(args.shared)]
    host = urlsplit(args.url).netloc
    for _ in range(args.requests):
        own = [choose.randrange(100, 20_000) for _ in range(args.prompt)]
        said: dict[str, Any] = {"model": args.model, "prompt": shared + own, "max_tokens": args.answer}
        said |= {"temperature": 0, "stream": True, "ignore_eos": True}
        body = json.dumps(said).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        yield f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def load(args: argparse.Namespace) -> list[Stream]:
    """All requests, answered. ConnectionError where one is refused or breaks off."""
    place = urlsplit(args.url)
    address = (place.hostname or "127.0.0.1", place.port or 80)
    selector, waiting, done = selectors.DefaultSelector(), bodies(args), list[Stream]()

    def start() -> None:
        if (request := next(waiting, None)) is not None:
            connection = socket.create_connection(address)
            connection.sendall(request)
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ, Stream(connection, time.perf_counter()))

    for _ in range(args.streams):
        start()
    while selector.get_map():
        for key, _ in selector.select():
            stream: Stream = key.data
            if data := stream.socket.recv(1 << 16):
                stream.take(data, time.perf_counter())
                continue
            selector.unregister(stream.socket)
            stream.socket.close()
            if b" 200 " not in stream.status or not stream.ended:
                raise ConnectionError(f"{stream.status.decode()} {stream.rest.decode(errors='replace')[:500]}")
            done.append(stream)
            start()
    return done


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("url")
    ask.add_argument("--model", default="model")
    for name, default in (("streams", 16), ("requests", 64), ("prompt", 32), ("shared", 0), ("answer", 128)):
        ask.add_argument(f"--{name}", type=int, default=default)
    ask.add_argument("--json", action="store_true")
    args = ask.parse_args()
    begin, cpu = time.perf_counter(), time.process_time()
    done = load(args)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    first = sorted(s.at[0] - s.begin for s in done)
    gaps = sorted(b - a for s in done for a, b in zip(s.at, s.at[1:], strict=False)) or [0.0]
    said = {
        "seconds": round(seconds, 3),
        "tokens_per_s": round(args.requests * args.answer / seconds, 1),
        "first_token_s": {"p50": round(statistics.median(first), 4), "p99": round(first[int(len(first) * 0.99)], 4)},
        "gap_s": {"p50": round(statistics.median(gaps), 5), "p99": round(gaps[int(len(gaps) * 0.99)], 5)},
        "generator_cpu_s": round(cpu, 3),
    }
    print(json.dumps(said) if args.json else "\n".join(f"{key}: {value}" for key, value in said.items()))


if __name__ == "__main__":
    main()
