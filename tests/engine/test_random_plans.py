"""Random schedules equal naive generation, whatever the budget, the blocks, the neighbours, preemptions and drafts."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, replace

import pytest
from toy import POISON, VOCAB, Answer, Letters, Toy, ToyTier, Windows, naive

from headrace.cache.blocks import Blocks
from headrace.cache.radix import PrefixCache
from headrace.execute.plan import Plan, Row, Want
from headrace.params import SamplingParams
from headrace.scheduler.messages import Delta, Submit
from headrace.scheduler.policy import Continuous, Dynamic, Policy, Static
from headrace.scheduler.request import Request
from headrace.scheduler.scheduler import Scheduler
from headrace.scheduler.turns import FairShare, Turns
from headrace.scheduler.windows import LEAST

TRIALS = 1000
PARTS = 5
RARE = (
    "reused",
    "copied",
    "recycled",
    "waited",
    "saved",
    "loaded",
    "evicted",
    "salted",
    "stalled",
    "drafts",
    "preempted",
    "resumed",
    "windows",
    "abort",
    "error",
    "stop",
    "length",
    "overtook",
    "batched",
    "slid",
    "scored in windows",
    "embedded",
    "embedded in rows",
)


class ShortestFirst:
    """By the length of the prompt: a stand-in, where many newcomers overtake."""

    def rank(self, request: Request) -> tuple[int, ...]:
        return (request.prompt, request.order, request.choice)

    def begins(self, request: Request) -> None:
        pass

    ends = begins


@dataclass(frozen=True)
class Config:
    block: int
    count: int
    windows: Windows
    budget: int
    rows: int
    context: int
    policy: Policy
    turns: Turns
    eos: frozenset[int]
    drafts: float
    reuse: bool
    tier: bool

    @classmethod
    def draw(cls, rng: random.Random) -> Config:
        windows = tuple(rng.choice((None, rng.randint(1, 12))) for _ in range(rng.choice((1, 1, 2, 3))))
        block = rng.choice((1, 2, 3, 4, 8))
        least = max(len(windows), -(-10 // block) * len(windows))
        return cls(
            block=block,
            count=rng.randint(least, least * rng.choice((2, 3, 8))),
            windows=windows,
            budget=rng.choice((1, 2, 3, 5, 8, 16, 64)),
            rows=rng.choice((1, 2, 3, 5, 8, 32)),
            context=rng.randint(8, 60),
            policy=draw_policy(rng),
            turns=rng.choice((FairShare(), FairShare(), FairShare(), ShortestFirst())),
            eos=frozenset(rng.sample(range(VOCAB), rng.choice((0, 1, 1, 2)))),
            drafts=rng.choice((0, 0, 0.5, 0.9)),
            reuse=rng.random() < 0.8,
            tier=rng.random() < 0.5,
        )

    def scheduler(self, tier: ToyTier) -> Scheduler:
        blocks = Blocks(self.count, self.windows, self.block, lasting=self.reuse)
        return Scheduler(
            blocks,
            prefix=PrefixCache(blocks, b"", tier if self.tier and self.reuse else None),
            reuse=self.reuse,
            budget=self.budget,
            rows=self.rows,
            context=self.context,
            eos=self.eos,
            text=Letters,
            policy=self.policy,
            turns=self.turns,
        )


def draw_policy(rng: random.Random) -> Policy:
    size = rng.randint(1, 6)
    batches = (Static(size, rng.choice((0, 0.002))), Dynamic(size, rng.choice((0, 0.002))))
    return rng.choice((Continuous(), Continuous(), Continuous(), *batches))


def draw_params(rng: random.Random, size: int) -> SamplingParams:
    """`size` is that of overflow's windows."""
    only_prompt = rng.random() < 0.04
    max_tokens = 0 if only_prompt else rng.choice((None, rng.randint(1, 25)))
    return SamplingParams(
        n=rng.choice((1, 1, 1, 1, 2, 3, 5)),
        temperature=rng.choice((0, 1)),
        frequency_penalty=rng.choice((0, 0, 1)),
        logit_bias=dict.fromkeys(rng.sample(range(VOCAB), rng.choice((0, 0, 2))), -100),
        seed=rng.choice((0, 7, -5, 2**63 - 1, *([POISON] if rng.random() < 0.1 else []))),
        max_tokens=max_tokens,
        min_tokens=rng.choice((0, 0, rng.randint(0, 25 if max_tokens is None else max_tokens))),
        stop=rng.choice(((), (), ("abc", "bb"), ("dc", "adb", "c"), ("cab",))),
        stop_token_ids=rng.choice(((), (), (1, 8))),
        include_stop_str_in_output=rng.random() < 0.3,
        ignore_eos=rng.random() < 0.3,
        logprobs=rng.choice((None, 0)),
        prompt_logprobs=0 if only_prompt else rng.choice((None, None, 0)),
        overflow=rng.choice(("error", "error", "sliding", "sinks")) if size >= LEAST else "error",
    )


def draw_pooling(rng: random.Random, params: SamplingParams) -> SamplingParams:
    """Now and then a vector is asked for instead of an answer."""
    if rng.random() > 0.15:
        return params
    pooling = rng.choice(("mean", "last"))
    return replace(params, pooling=pooling, n=1, max_tokens=0, min_tokens=0, prompt_logprobs=None, overflow="error")


def draw_prompt(rng: random.Random, most: int, before: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Often one that begins like an earlier one and its answer: another question, or the next turn."""
    new = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, most - 1)))
    if not before or rng.random() < 0.3:
        return new
    old = rng.choice(before)
    return (old[: rng.randint(1, len(old))] + new)[: rng.randint(1, most - 1)]


def drafted(
    plan: Plan, scheduler: Scheduler, block: int, want: dict[tuple[int, int], Answer], share: float, rng: random.Random
) -> Plan:
    """The plan with drafts, right ones and wrong ones, where the row's last block has room for them."""
    known = {r.id: r for r in scheduler.running}

    def draft(row: Row) -> Row:
        room = -(row.start + len(row.tokens)) % block
        if row.want is not Want.TOKEN or rng.random() > share:
            return row
        r = known[row.request]
        if r.windows:
            room = min(room, r.windows.size - len(r.tokens) - 1)
        if room < 1:
            return row
        count = rng.randint(1, room)
        guess = want[r.user, r.choice].tokens[r.length - r.prompt :][:count]
        guess += [rng.randrange(VOCAB) for _ in range(count - len(guess))]
        if rng.random() < 0.4:
            guess[rng.randrange(count)] = rng.randrange(VOCAB)
        return replace(row, tokens=row.tokens + tuple(guess), drafts=count)

    return replace(plan, rows=tuple(draft(row) for row in plan.rows))


def collect(got: dict[tuple[int, int], Answer], deltas: list[Delta]) -> None:
    for d in deltas:
        got.setdefault((d.request, d.choice), Answer()).add(d)


def check_plan(plan: Plan, config: Config) -> None:
    assert sum(len(row.tokens) for row in plan.rows) <= config.budget
    assert len(plan.rows) <= config.rows
    assert all(row.tokens for row in plan.rows)


def overtaken(scheduler: Scheduler) -> bool:
    """Does somebody run who came after one that waits and never began?"""
    latest = max((r.order for r in scheduler.running), default=0)
    return any(r.order < latest and not r.preemptions for r in scheduler.waiting)


def watch(blocks: Blocks) -> list[int]:
    """All blocks whose contents are given up from now on."""
    forgotten: list[int] = []
    forget = blocks.forget

    def note(b: int) -> None:
        forgotten.append(b)
        forget(b)

    blocks.forget = note
    return forgotten


def trial(seed: int) -> Counter[str]:
    """One random configuration to its end. How often what is worth testing happened."""
    rng = random.Random(seed)
    config = Config.draw(rng)
    tier = ToyTier()
    scheduler, toy = config.scheduler(tier), Toy(config.count, config.block, config.windows, tier, rng)
    most = min(config.context, scheduler.blocks.most_tokens + 1)
    size = min(config.context, scheduler.blocks.most_tokens)
    forgotten = watch(scheduler.blocks)
    seen: Counter[str] = Counter()
    arrivals: dict[int, list[Submit]] = {}
    aborts: dict[int, list[int]] = {}
    want: dict[tuple[int, int], Answer] = {}
    known: list[tuple[int, ...]] = []
    for user in range(rng.randint(1, 10)):
        drawn = draw_pooling(rng, draw_params(rng, size))
        prompt = draw_prompt(rng, 4 * most if drawn.windowed else most, known)
        at = rng.choice((0, rng.randint(0, 30)))
        salt, priority = rng.choice(("", "", "", "mine")), rng.choice((0, 0, 1, -2))
        tenant = rng.choice(("", "", "a", "b"))
        params = replace(drawn, cache_salt=salt, priority=priority)
        seen["salted"] += bool(salt)
        arrivals.setdefault(at, []).append(Submit(user, prompt, params, time.monotonic(), tenant))
        if rng.random() < 0.15:
            aborts.setdefault(at + rng.randint(0, 20), []).append(user)
        for choice in range(params.n):
            want[user, choice] = naive(prompt, params, choice, config.windows, config.eos, most, size)
            known.append(prompt + tuple(want[user, choice].tokens))
    got: dict[tuple[int, int], Answer] = {}
    step = 0
    while step <= 50 or scheduler.running or scheduler.waiting:
        for message in arrivals.pop(step, ()):
            assert scheduler.submit(message) == []
        for user in aborts.pop(step, ()):
            collect(got, scheduler.abort(user))
        scheduler.check()
        if (plan := scheduler.plan()) is not None:
            check_plan(plan, config)
            seen["overtook"] += overtaken(scheduler)
            seen["reused"] += sum(row.shared > 0 for row in plan.rows)
            seen["copied"] += sum(bool(row.copied) for row in plan.rows)
            seen["waited"] += any(r.id not in scheduler._rows and not r.known for r in scheduler.running)
            seen["resumed"] += sum(len(a.tokens) > a.prompt for a in plan.admitted)
            seen["slid"] += sum(a.left_out > 0 for a in plan.admitted)
            seen["scored in windows"] += sum(
                row.want is Want.PROMPT and bool(request.left_out)
                for row in plan.rows
                for request in scheduler.running
                if request.id == row.request
            )
            pooling = {r.id: r.params.pooling for r in scheduler.running if r.params.pooling}
            pooled = [row for row in plan.rows if row.request in pooling]
            seen["embedded"] += sum(row.want is Want.HIDDEN for row in pooled)
            seen["embedded in rows"] += sum(row.want is Want.NOTHING for row in pooled)
            seen["stalled"] += len(scheduler.running) > len(plan.rows)
            if config.drafts:
                plan = drafted(plan, scheduler, config.block, want, config.drafts, rng)
                seen["drafts"] += sum(row.drafts for row in plan.rows)
            collect(got, scheduler.commit(plan, toy.run(plan)))
        else:
            assert not scheduler.running
            seen["batched"] += bool(scheduler.waiting)
        scheduler.check()
        step += 1
        assert step < 20000, "it does not end"
    while (plan := scheduler.plan()) is not None:
        assert not plan.rows
        assert scheduler.commit(plan, toy.run(plan)) == []
        scheduler.check()
    stats = scheduler.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
    assert not toy.states, "the executor still keeps somebody"
    assert got.keys() == want.keys(), "somebody was lost"
    for key, answer in got.items():
        compare(answer, want[key], seen)
    assert stats.prefix_hits <= stats.prefix_asked
    assert stats.places_filled <= stats.places
    assert stats.tokens_out == sum(len(a.tokens) for a in got.values())
    seen["recycled"] += toy.recycled
    seen["saved"] += stats.tier_saves
    seen["loaded"] += stats.tier_loads
    seen["evicted"] += config.reuse * len(forgotten)
    seen["windows"] += any(config.windows)
    assert config.reuse or (stats.blocks_idle == 0 and len(scheduler.prefix) == 0)
    seen["preempted"] += stats.preemptions
    return seen


def compare(got: Answer, want: Answer, seen: Counter[str]) -> None:
    seen[got.finish or "none"] += 1
    if got.finish in ("abort", "error"):
        n = len(got.tokens)
        assert got.tokens == want.tokens[:n]
        assert got.pieces == want.pieces[:n]
        assert got.text == "".join(got.pieces)
        assert got.logprobs == want.logprobs[:n]
        assert got.prompt_logprobs == want.prompt_logprobs[: len(got.prompt_logprobs)]
        assert (got.error is not None) == (got.finish == "error")
    else:
        assert got == want


@pytest.mark.parametrize("part", range(PARTS))
def test_random_schedules_equal_naive_generation(part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(part * TRIALS // PARTS, (part + 1) * TRIALS // PARTS):
        try:
            seen += trial(seed)
        except Exception as error:
            error.add_note(f"trial({seed})")
            raise
    rare = {k: seen[k] for k in RARE}
    assert min(rare.values()) >= 10, f"too seldom to prove anything: {rare}"
