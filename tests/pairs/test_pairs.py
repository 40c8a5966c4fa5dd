"""Members of the seams, two at a time, on a tiny model: every answer, tokens and log-probabilities to the last bit, is
that of its request alone on a plain engine; and both members were really on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, AsyncLLM, SamplingParams, native
from headrace.cache.blocks import Blocks
from headrace.engine import build
from headrace.scheduler.policy import Static
from headrace.scheduler.scheduler import Stats
from tests.exact.test_engine import told
from tests.exact.watched import Watched
from tests.pairs.members import MEMBERS, MOST, OWN, REQUESTS, Member, Seen

WARM: dict[str, Any] = {"temperature": 8, "seed": 17, "max_tokens": 16, "ignore_eos": True, "logprobs": 2}
"""A tiny random model is sure of itself; so each token depends on many logits."""
PLAIN: dict[str, Any] = {"context": 256, "past_load": False, "weight_cache": False}
MODEL = "blocks_of_32"
LEAVER = 60
"""Tokens of the prompt of each request that leaves, and of its answer if it stayed."""
Wants = Callable[[tuple[Member, ...]], list[object]]


def compatible(a: Member, b: Member) -> bool:
    return all(b.settings.get(name, value) == value for name, value in a.settings.items())


def here(member: Member) -> bool:
    """Another instruction set than the one that is on anyway, and one that this machine has."""
    return member.options.get("isa") in (None, *native.isas()[1:])


HERE = tuple(filter(here, MEMBERS))
PAIRS = [(a, b) for a, b in combinations(HERE, 2) if compatible(a, b)]


def prompts() -> list[list[int]]:
    """Some share whole blocks, or parts of one; one is asked twice."""
    rng = np.random.default_rng(3)
    base = rng.integers(0, 256, 100).tolist()
    own = [rng.integers(0, 256, length).tolist() for length in (5, 33, 0, 90, 1, 20, 0, 40)]
    shared = [64, 70, 33, 0, 0, 50, 64, 0]
    made = [base[:length] + more for length, more in zip(shared, own, strict=True)]
    made[6] = made[0]
    assert len(made) == REQUESTS
    assert shared[OWN] == 0
    return made


def fields(members: tuple[Member, ...], number: int) -> dict[str, Any]:
    """Of the request's sampling, those that its answer depends on."""
    asked = [member.asks for member in members if number % member.every == 0]
    return WARM | {name: value for asks in asked for name, value in asks.items()}


@pytest.fixture(scope="module")
def wants(tiny_path: Callable[[str], Path]) -> Iterator[Wants]:
    """The answers of each request alone, on a plain engine of the same basis."""
    plain: dict[object, LLM] = {}

    @cache
    def want(members: tuple[Member, ...]) -> list[object]:
        basis = {name: value for member in members for name, value in member.basis.items()}
        if (key := tuple(basis.items())) not in plain:
            path = tiny_path(basis.pop("model", MODEL))
            plain[key] = LLM(path, **PLAIN | basis, threads=1, prefix_cache=False, pool_bytes=1 << 24)
        llm = plain[key]
        return [told(llm.generate(p, SamplingParams(**fields(members, i)))[0]) for i, p in enumerate(prompts())]

    yield lambda members: want(tuple(m for m in members if m.basis or m.asks))
    for llm in plain.values():
        llm.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batch of a static policy begins after a moment instead of ten seconds."""
    monkeypatch.setattr(build, "Static", partial(Static, patience_s=0.02))


def run(members: tuple[Member, ...], model: Callable[[str], Path], folder: Path) -> Seen:
    options: dict[str, Any] = {"model": MODEL, "threads": 2, "pool_requests": 2 * REQUESTS}
    for member in members:
        options |= {**member.options, **member.basis}
    path = model(options.pop("model"))
    if "cache_dir" in options:
        options["cache_dir"] = str(folder / "tier")
    if "pin_prefix" in options:
        (folder / "pinned.txt").write_text("What is computed once and for all of them. " * 2, encoding="utf-8")
        options["pin_prefix"] = str(folder / "pinned.txt")
    options["pool_bytes"] = int(options.pop("pool_requests") * request_bytes(path, options.get("kv_format", "bf16")))
    for start in range(max(member.starts for member in members) if members else 1):
        llm = AsyncLLM(path, **PLAIN | options)
        watched = Watched(llm.model)
        for member in members:
            member.prepare(watched)
        rounds = []
        try:
            for number in range(2):
                rounds.append(asyncio.run(ask(llm, watched, members, f"{start}.{number}")))
            stats = idle(llm, watched.scheduler.blocks)
        finally:
            llm.close()
    return Seen(llm, watched, stats, rounds, len(list(folder.glob("tier/*.kv"))))


def idle(llm: AsyncLLM, blocks: Blocks) -> Stats:
    """Nothing is left but what is pinned, as soon as moves to a tier are over."""
    deadline = time.monotonic() + 10
    while (stats := llm.stats()).running or stats.waiting or stats.blocks_used > blocks.reserved:
        assert time.monotonic() < deadline, stats
        time.sleep(0.001)
    return stats


@cache
def request_bytes(path: Path, kv_format: str) -> int:
    """Of the pool, for the longest request."""
    with LLM(path, **PLAIN, kv_format=kv_format, pool_bytes=1 << 22) as llm:
        plan = llm.model.plan
    windows = [group.window for group in plan.program.kv.groups]
    return plan.memory.pool.block_bytes * Blocks(1, windows).need(max(map(len, prompts())) + MOST)


async def ask(llm: AsyncLLM, watched: Watched, members: tuple[Member, ...], occasion: str) -> list[Any]:
    """All requests at once, those that leave among them; the answers of the others."""
    streams = []
    leavers = [state for member in members for state in member.leavers][::-1]
    with watched.together():
        for number, prompt in enumerate(prompts()):
            more = {name: value for m in members for name, value in m.fields(number, occasion).items()}
            tenant = "".join(member.tenant(number) for member in members)
            params = SamplingParams(**fields(members, number), **more)
            if number % 2 and leavers:
                other = [*prompt[:40], *range(LEAVER - len(prompt[:40]))]
                stream = llm.submit(other, SamplingParams(**WARM | {"max_tokens": LEAVER}), tenant=tenant)
                watched.leaves[stream.id] = leavers.pop()
                streams.append(stream)
            streams.append(llm.submit(prompt, params, tenant=tenant))
        leaving = set(watched.leaves)
    done = await asyncio.gather(*(stream.drain() for stream in streams))
    return [output for stream, output in zip(streams, done, strict=True) if stream.id not in leaving]


def check(members: tuple[Member, ...], seen: Seen, wants: Wants) -> None:
    want = wants(members)
    for outputs in seen.rounds:
        assert [told(output) for output in outputs] == want
    for member in members:
        rest = tuple(m for m in members if m is not member)
        if member.took is None:
            assert want != wants(rest), f"{member.name} changes nothing"
        else:
            assert member.took(seen), f"{member.name} was not on"


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " + ".join(member.name for member in pair))
def test_together(pair: tuple[Member, ...], tiny_path: Callable[[str], Path], tmp_path: Path, wants: Wants) -> None:
    check(pair, run(pair, tiny_path, tmp_path), wants)


def test_nothing_is_on_by_itself(tiny_path: Callable[[str], Path], tmp_path: Path, wants: Wants) -> None:
    """Else being on would prove nothing. What a member proves is also that it is another than the next."""
    seen = run((), tiny_path, tmp_path)
    check((), seen, wants)
    on = [member.name for member in HERE if member.took is not None and member.took(seen)]
    assert on == [member.name for member in HERE if member.default]
    assert len({member.name for member in MEMBERS}) == len(MEMBERS)
