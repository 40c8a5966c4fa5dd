"""Clients that leave at every bad moment, over real HTTP: is everything given back, each time, and memory flat?

    python -m bench.leaving MODEL [--minutes 30] [--clients 500] [--rows 16] [--blocks 256] [--budget 512]
                            [--within 1] [--json OUT.json]

Rounds of `clients` at once. Each is of a kind, drawn by lot: it drops while queued; in the middle of its prompt (a
long one, of high priority, so that it begins soon); after the first token; after the last token, before [DONE]; with
one of four choices done; by a time-out of its own, waiting for a whole answer; or it stays, and must get all its
tokens. Half of those that drop reset the connection, the others close it. At a random moment all who are still there
leave at once, while the queue is long.

After each round, `within` seconds of that last drop: no request running or waiting, no block in use but what the prefix
cache keeps, no more steps (the one under way ends first: up to `budget` tokens of prompts); then one more request is
answered. At the end resident memory (the last quarter of the
rounds beside the second) and open files must be flat. No endpoint shows these counts: the server is a process started
here, which tells them through a pipe. Exits with 1 where something does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import statistics
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from bench.serving import Facts, Server, files_up
from headrace.config import Options
from headrace.engine.build import plan_engine
from headrace.loading.resolve import resolve

CONTEXT = 2048
LONG = 1500
"""Tokens of a prompt that takes several steps."""
KINDS = {
    "queued": 3,
    "mid-prompt": 1,
    "first token": 3,
    "before [DONE]": 3,
    "one of four done": 3,
    "time-out": 2,
    "stays": 3,
}
"""With how often each is drawn, to each other."""
ROUND_S = 10.0
"""All who are still there leave so late at most."""


def served(args: argparse.Namespace) -> Server:
    """With so small a pool that requests also preempt each other and the cache is full soon."""
    options: dict[str, Any] = {"context": CONTEXT, "rows": args.rows, "budget": args.budget}
    options |= {"queue_requests": 10**6, "queue_tokens": 10**9}
    block = plan_engine(resolve(args.model), Options.of(**options)).memory.pool.block_bytes
    return Server(args.model, "thread", {**options, "pool_bytes": args.blocks * block})


def left(now: Facts) -> str:
    return f"{now.stats.running} / {now.stats.waiting} / {now.stats.blocks_used}"


class Client:
    """One request on a connection of its own."""

    def __init__(self, port: int, choose: random.Random, kind: str) -> None:
        self.port, self.choose, self.kind = port, choose, kind
        self.asked = 0
        """Tokens of its answer."""

    async def run(self) -> str:
        """What it saw of itself: its kind, or "too late" where the answer was complete before it could leave."""
        await asyncio.sleep(self.choose.random())
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        body = json.dumps(self.body()).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        try:
            await writer.drain()
            return await self.wait(reader)
        finally:
            if self.kind != "stays" and self.choose.random() < 0.5:  # a reset
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def body(self) -> dict[str, Any]:
        prompt = LONG if self.kind == "mid-prompt" else self.choose.randint(1, 80)
        said: dict[str, Any] = {"prompt": [self.choose.randrange(1000, 20_000) for _ in range(prompt)]}
        said |= {"max_tokens": self.choose.randint(8, 32), "ignore_eos": True, "stream": self.kind != "time-out"}
        if self.kind == "mid-prompt":
            said |= {"priority": 100}
        elif self.kind == "before [DONE]":
            said |= {"max_tokens": self.choose.randint(1, 3), "stream_options": {"include_usage": True}}
        elif self.kind == "one of four done":  # each ends somewhere else
            said |= {"n": 4, "temperature": 1.0, "max_tokens": 64, "stop": ["e"]}
        elif self.kind == "time-out":
            said |= {"max_tokens": 400}
        elif self.kind == "stays":
            said |= {"stream_options": {"include_usage": True}}
        self.asked = said["max_tokens"]
        return said

    async def wait(self, reader: asyncio.StreamReader) -> str:
        if self.kind in ("queued", "mid-prompt", "time-out"):
            longest = {"queued": 0.1, "mid-prompt": 1.0, "time-out": 2.0}[self.kind]
            try:  # the head of a stream comes at once, the rest when there is some
                await asyncio.wait_for(
                    reader.read() if self.kind == "time-out" else first(reader), self.patience(longest)
                )
            except TimeoutError:
                return self.kind
            return "too late"
        ended, told = set[int](), 0
        async for event in events(reader):
            if "error" in event:
                raise RuntimeError(f"{self.kind}: {event}")
            if self.kind == "first token":
                return self.kind
            if usage := event.get("usage"):
                told = usage["completion_tokens"]
            for choice in event["choices"]:
                if choice["finish_reason"] is not None:
                    ended.add(choice["index"])
            if ended and self.kind == "before [DONE]":
                return self.kind
            if ended and self.kind == "one of four done":
                return self.kind if len(ended) < 4 else "too late"
        if not ended or (self.kind == "stays" and told != self.asked):
            raise RuntimeError(f"{self.kind}: the answer broke off after {told} of {self.asked} tokens")
        return self.kind if self.kind == "stays" else "too late"

    def patience(self, longest: float) -> float:
        return longest * self.choose.random()


async def events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Until [DONE]. RuntimeError where the status is not 200."""
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{status.decode().strip()}: {(await reader.read(2000)).decode(errors='replace')[-500:]}")
    while line := await reader.readline():
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


async def first(reader: asyncio.StreamReader) -> None:
    async for _ in events(reader):
        return


async def quiet(server: Server, within_s: float) -> tuple[float, list[str]]:
    """Seconds until nothing was left, and what is wrong."""
    begin = time.monotonic()
    while (now := server.facts()).stats.running or now.stats.waiting or now.stats.blocks_used:
        if time.monotonic() - begin > within_s:
            return time.monotonic() - begin, [f"after {within_s:g} s still {left(now)}"]
        await asyncio.sleep(0.005)
    passed = time.monotonic() - begin
    await asyncio.sleep(0.2)
    more = server.facts().stats.steps - now.stats.steps
    return passed, [f"{more} more steps for nobody"] if more else []


async def one_round(server: Server, number: int, args: argparse.Namespace) -> dict[str, Any]:
    choose = random.Random(number)
    kinds = choose.choices(list(KINDS), list(KINDS.values()), k=args.clients)
    clients = [Client(server.port, random.Random(f"{number} {i}"), kind) for i, kind in enumerate(kinds)]
    tasks = [asyncio.ensure_future(client.run()) for client in clients]
    _, there = await asyncio.wait(tasks, timeout=choose.uniform(2, ROUND_S))
    before = server.facts()
    for task in there:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    gone_s, wrong = await quiet(server, args.within)
    saw = ["all at once" if isinstance(one, asyncio.CancelledError) else one for one in ended]
    wrong += [f"{one!r}" for one in saw if isinstance(one, BaseException)][:5]
    try:
        await Client(server.port, choose, "stays").run()
    except (RuntimeError, OSError) as error:
        wrong.append(f"nobody is answered afterwards: {error}")
    return {
        "round": number,
        "before": left(before),
        "gone_s": round(gone_s, 3),
        "memory": (after := server.facts()).memory,
        "files": after.files,
        "preemptions": after.stats.preemptions,
        "saw": dict(Counter(one for one in saw if isinstance(one, str))),
        "wrong": wrong,
    }


async def rounds(server: Server, args: argparse.Namespace) -> list[dict[str, Any]]:
    until, found = time.monotonic() + 60 * args.minutes, list[dict[str, Any]]()
    while time.monotonic() < until:
        found.append(one := await one_round(server, len(found), args))
        who = ", ".join(f"{kind}: {count}" for kind, count in sorted(one["saw"].items()))
        cells = (one["round"], one["before"], one["gone_s"], f"{one['memory'] / 1e6:.1f}", one["files"], who)
        print("|", " | ".join(map(str, (*cells, "; ".join(one["wrong"])))), "|", flush=True)
    return found


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("model")
    ask.add_argument("--minutes", type=float, default=30)
    ask.add_argument("--within", type=float, default=1)
    for name, default in (("clients", 500), ("rows", 16), ("blocks", 256), ("budget", 512)):
        ask.add_argument(f"--{name}", type=int, default=default)
    ask.add_argument("--json", type=Path)
    args = ask.parse_args()
    files_up()
    print("| round | running / waiting / blocks before | gone after, s | MB | files | who left when | wrong |")
    print("|--:|--:|--:|--:|--:|---|---|", flush=True)
    server = served(args)
    try:
        found = asyncio.run(rounds(server, args))
    finally:
        server.close()
    quarter = len(found) // 4
    wrong = [f"round {one['round']}: {what}" for one in found for what in one["wrong"]]
    said: dict[str, Any] = {"rounds": len(found), "longest_gone_s": max(one["gone_s"] for one in found)}
    if quarter >= 5:  # else it is still filling the pool
        for what in ("memory", "files"):
            early = statistics.median(one[what] for one in found[quarter : 2 * quarter])
            late = statistics.median(one[what] for one in found[-quarter:])
            said[f"{what}_grew_by"] = round(late / early - 1, 4)
            if late > early * 1.01:
                wrong.append(f"{what} grew from {early:,.0f} to {late:,.0f}")
    said["saw"] = dict(sum((Counter(one["saw"]) for one in found), Counter[str]()))
    wrong += [f"no client was of the kind {kind!r}" for kind in KINDS if kind not in said["saw"]]
    said["wrong"] = wrong
    print(json.dumps(said, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(said | {"each": found}, indent=1) + "\n")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
