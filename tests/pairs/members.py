"""The members of every seam, one line each. Whoever adds one gets its pairs with all others from `test_pairs.py`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace import AsyncLLM, RequestOutput
from headrace.params import Grammar, Reasoning
from headrace.scheduler.pace import KNOWN
from headrace.scheduler.policy import Dynamic, Static
from headrace.scheduler.scheduler import Stats
from tests.exact.watched import Watched

REQUESTS = 8
"""In each round."""
MOST = 70
"""Tokens of the longest answer."""
SHORT = 120
"""A context that the longest prompts fit into, but not their answers."""
OWN = 3
"""The request whose prompt has nothing in common with others."""


@dataclass(frozen=True)
class Seen:
    """One run of the workload, its engine closed."""

    llm: AsyncLLM
    watched: Watched
    stats: Stats
    rounds: list[list[RequestOutput]]
    files: int
    """In `cache_dir`, when all was over."""

    @property
    def backend(self) -> Any:
        return self.llm.model.plan.backend

    def cached(self, *numbers: int) -> list[int]:
        """Tokens of a prompt that were not computed, of these requests (all) in every round."""
        outputs = [o for each in self.rounds for i, o in enumerate(each) if i in (numbers or range(REQUESTS))]
        return [o.outputs[0].timings.cached for o in outputs if o.outputs[0].timings is not None]


@dataclass(frozen=True, eq=False)
class Member:
    """One thing that can be on. `took` proves that it really was; without it the answers must be others than without
    the member."""

    name: str
    took: Callable[[Seen], bool] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the engine: they change no answer. `pool_requests` is the pool's size in
    requests as long as the longest."""
    basis: Mapping[str, Any] = field(default_factory=dict)
    """What answers depend on, `model` or other options of the engine: the plain one has them too."""
    asks: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a request's sampling that change its answer,"""
    every: int = 1
    """for the first request, and every so many-th after it."""
    fields: Callable[[int, str], Mapping[str, Any]] = lambda number, occasion: {}
    """Fields of request `number` that change no answer; `occasion` is another in each round and after each start."""
    tenant: Callable[[int], str] = lambda number: ""
    leavers: tuple[str, ...] = ()
    """Further requests, each of which is aborted in this state (`Watched`)."""
    prepare: Callable[[Watched], None] = lambda watched: None
    """Done to each engine before its first request."""
    starts: int = 1
    """How often the engine is started, one after the other."""
    default: bool = False
    """It is on where nothing is said."""

    @property
    def settings(self) -> dict[str, Any]:
        """Two members that set one of these differently exclude each other."""
        return {**self.options, **self.basis, **self.asks, **({"leavers": True} if self.leavers else {})}


def slow(watched: Watched) -> None:
    """Steps are remembered as so slow that the first prompts do not fit into a millisecond, whatever the machine."""
    pace = watched.scheduler.pace
    assert pace is not None
    for _ in range(KNOWN):
        pace.took(answers=0, others=100, seconds=0.01)


def outgrew(seen: Seen) -> bool:
    """Did a text go on beyond the context?"""
    outputs = [output for each in seen.rounds for output in each]
    return any(len(output.prompt_token_ids) + len(output.outputs[0].token_ids) > SHORT for output in outputs)


LETTERS = "b-x"
THINK = 65
"""Begins a thinking, and the next token ends it."""


def kept_to_it(seen: Seen) -> bool:
    """Did all answers consist of some letters alone, where a model draws any bytes?"""
    texts = [output.outputs[0].text for each in seen.rounds for output in each if not output.embedding]
    return all(re.search(f"[{LETTERS}]{{3,}}$", text) for text in texts)


def thought_first(seen: Seen) -> bool:
    """Did all answers end their thinking, or themselves, within its budget?"""
    answers = [output.outputs[0].token_ids for each in seen.rounds for output in each]
    return all(THINK + 1 in answer[:5] or len(answer) <= 4 for answer in answers)


TIER = {"prefix_cache": True, "cache_dir": "tier"}
VECTOR = {"max_tokens": 0, "min_tokens": 0, "n": 1, "prompt_logprobs": None}
MEMBERS = (
    # When requests begin, and how much of them a step takes up
    Member(
        "static",
        lambda seen: isinstance(seen.watched.scheduler.policy, Static) and seen.watched.most_rows <= 3,
        {"policy": "static", "batch_size": 3},
    ),
    Member(
        "dynamic",
        lambda seen: isinstance(seen.watched.scheduler.policy, Dynamic) and seen.watched.most_rows <= 3,
        {"policy": "dynamic", "batch_size": 3, "max_wait_ms": 5},
    ),
    Member("three rows", lambda seen: seen.watched.most_rows <= 3, {"rows": 3}),
    Member("budget", lambda seen: seen.watched.most_tokens <= 16 and seen.watched.cuts > 0, {"budget": 16}),
    Member("pace", lambda seen: seen.watched.cuts > 0, {"step_ms": 1}, prepare=slow),
    # Where keys and values lie
    Member("f32", basis={"kv_format": "f32"}),
    Member("int8", basis={"kv_format": "int8"}),
    Member("int4", basis={"kv_format": "int4"}),
    Member("windows", lambda seen: seen.watched.trimmed, basis={"model": "bf16_windows"}),
    Member("prefix", lambda seen: seen.stats.prefix_hits > 100, {"prefix_cache": True}, default=True),
    Member("no prefix", lambda seen: not any(seen.cached()), {"prefix_cache": False}),
    Member("pinned", lambda seen: seen.watched.scheduler.blocks.reserved > 0, {"prefix_cache": True, "pin_prefix": 1}),
    Member(
        "small pool",
        lambda seen: seen.stats.preemptions > 0,
        {"pool_requests": 1.4},
        asks={"max_tokens": MOST},
    ),
    Member("disk", lambda seen: seen.files > 0, TIER),
    Member("warm disk", lambda seen: seen.stats.tier_loads > 0, TIER, starts=2),
    # Who computes
    Member("no fusion", lambda seen: not seen.backend.fuse, {"fusion": False}),
    Member("one thread", lambda seen: seen.llm.model.threads == 1, {"threads": 1}),
    Member("avx2", lambda seen: seen.backend.isa == "avx2", {"isa": "avx2"}),
    Member("portable", lambda seen: seen.backend.isa == "portable", {"isa": "portable"}),
    # Whose requests they are
    Member(
        "priorities",
        lambda seen: seen.watched.begun != sorted(seen.watched.begun),
        fields=lambda number, occasion: {"priority": 50 * (number % 3)},
    ),
    Member(
        "tenants",
        lambda seen: seen.watched.begun != sorted(seen.watched.begun),
        tenant=lambda number: "late" if number > 5 else "early",
    ),
    Member(
        "salts",
        lambda seen: not any(seen.cached(OWN)),
        fields=lambda number, occasion: {"cache_salt": occasion if number % 2 else ""},
    ),
    Member("leavers", lambda seen: seen.stats.aborts > 1, leavers=("queued", "reading", "answering", "answering")),
    # What is asked of the sampler
    Member("greedy", asks={"temperature": 0}),
    Member("choices", asks={"n": 3}, every=2),
    Member(
        "penalties",
        asks={"repetition_penalty": 1.3, "frequency_penalty": 0.9, "presence_penalty": 0.5, "logit_bias": {7: 30}},
    ),
    Member("stops", asks={"stop_token_ids": tuple(range(0, 256, 9)), "min_tokens": 3}, every=3),
    Member("processed", asks={"logprobs_mode": "processed", "temperature": 2.0, "top_k": 20}),
    Member("grammar", kept_to_it, asks={"grammar": Grammar("regex", f"[{LETTERS}]{{200,}}")}),
    Member("thinking", thought_first, asks={"reasoning": Reasoning(THINK, THINK + 1, budget=4, begun=True)}),
    Member("sliding", outgrew, basis={"context": SHORT}, asks={"overflow": "sliding", "max_tokens": MOST}),
    Member("sinks", outgrew, basis={"context": SHORT}, asks={"overflow": "sinks", "max_tokens": MOST}),
    Member("prompt's", asks={"prompt_logprobs": 2}, every=2),
    Member("means", asks={"pooling": "mean", **VECTOR}, every=3),
    Member("lasts", asks={"pooling": "last", **VECTOR}, every=3),
)
