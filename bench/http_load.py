"""Streams over HTTP from one light process: raw sockets, one thread, its own CPU time reported.

    python bench/http_load.py http://127.0.0.1:8000 [--model NAME] [--streams 16] [--requests 64] [--prompt 32]
                              [--shared 0] [--answer 128] [--json]

`requests` completions of `answer` tokens, `streams` at a time, each on a connection of its own, greedy, end tokens
ignored. Prompts are token ids: the first `shared` the same for all, `prompt` others. Speaks what OpenAI's completions
are on every server: one event for each token, or for a few; with usage in the last, where the server says it.
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


@dataclass(frozen=True)
class Load:
    """What is asked for."""

    url: str
    model: str = "model"
    streams: int = 16
    requests: int = 64
    prompt: int = 32
    shared: int = 0
    answer: int = 128
    seed: int = 1
    """Of the tokens that are shared."""
    own_seed: int = 2
    """Of the others."""


@dataclass
class Stream:
    """One request under way."""

    socket: socket.socket
    begin: float
    rest: bytes = b""
    status: bytes = b""
    at: list[float] = field(default_factory=list)
    """When each event with text came, in seconds."""
    usage: dict[str, Any] = field(default_factory=dict)
    """As the server says it at the end; empty where it does not."""
    ended: bool = False

    def take(self, data: bytes, now: float) -> None:
        if not self.status:
            self.status = data.split(b"\r\n", 1)[0]
        lines = (self.rest + data).split(b"\n")
        self.rest = lines.pop()
        for line in lines:
            if line.startswith(b"data: [DONE]"):
                self.ended = True
            elif line.startswith(b"data: "):
                if b'"text"' in line:
                    self.at.append(now)
                if b'"usage":{' in line.replace(b" ", b""):
                    self.usage = json.loads(line[6:])["usage"]


def tokens(seed: str, count: int) -> list[int]:
    """Ids that all models worth measuring have, none of them special there."""
    choose = random.Random(seed)
    return [choose.randrange(1000, 20_000) for _ in range(count)]


def bodies(asked: Load) -> Iterator[bytes]:
    """The requests to come, as they go over the wire."""
    shared = tokens(f"shared {asked.seed}", asked.shared)
    host = urlsplit(asked.url).netloc
    for number in range(asked.requests):
        own = tokens(f"own {asked.own_seed} {number}", asked.prompt)
        said: dict[str, Any] = {"model": asked.model, "prompt": shared + own, "max_tokens": asked.answer}
        said |= {"temperature": 0, "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
        body = json.dumps(said).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        yield f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def load(asked: Load) -> list[Stream]:
    """All requests, answered. ConnectionError where one is refused or breaks off."""
    place = urlsplit(asked.url)
    address = (place.hostname or "127.0.0.1", place.port or 80)
    selector, waiting, done = selectors.DefaultSelector(), bodies(asked), list[Stream]()

    def start() -> None:
        if (request := next(waiting, None)) is not None:
            connection = socket.create_connection(address)
            connection.sendall(request)
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ, Stream(connection, time.perf_counter()))

    for _ in range(asked.streams):
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


def measured(asked: Load) -> dict[str, Any]:
    """The figures of one load, the generator's own processor time among them."""
    begin, cpu = time.perf_counter(), time.process_time()
    done = load(asked)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    first = sorted(s.at[0] - s.begin for s in done)
    gaps = sorted(b - a for s in done for a, b in zip(s.at, s.at[1:], strict=False)) or [0.0]
    answered = [s.usage["completion_tokens"] for s in done if "completion_tokens" in s.usage]
    cached = [(s.usage.get("prompt_tokens_details") or {}).get("cached_tokens") for s in done]
    said = [tokens for tokens in cached if tokens is not None]
    return {
        "seconds": round(seconds, 3),
        "tokens_per_s": round(asked.requests * asked.answer / seconds, 1),
        "first_token_s": {"p50": round(statistics.median(first), 4), "p99": round(first[int(len(first) * 0.99)], 4)},
        "gap_s": {"p50": round(statistics.median(gaps), 5), "p99": round(gaps[int(len(gaps) * 0.99)], 5)},
        "generator_cpu_s": round(cpu, 3),
        "answered_in_full": sum(tokens == asked.answer for tokens in answered),
        "reused_tokens": sum(said) if said else None,
    }


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("url")
    ask.add_argument("--model", default="model")
    for name, default in (("streams", 16), ("requests", 64), ("prompt", 32), ("shared", 0), ("answer", 128)):
        ask.add_argument(f"--{name}", type=int, default=default)
    ask.add_argument("--json", action="store_true")
    args = vars(ask.parse_args())
    as_json = args.pop("json")
    said = measured(Load(**args))
    print(json.dumps(said) if as_json else "\n".join(f"{key}: {value}" for key, value in said.items()))


if __name__ == "__main__":
    main()
