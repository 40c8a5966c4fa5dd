"""Options, one frozen dataclass per part. Plain data: nothing here looks at the machine or at a model.

The command line is made from these fields: a field's metadata gives its help text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any

from headrace.errors import OptionError, shown

KV_FORMATS = ("f32", "bf16", "int8", "int4")
BACKENDS = ("native", "torch")
ISAS = ("portable", "avx2", "avx512", "amx")
POLICIES = ("continuous", "static", "dynamic")
MOST_THREADS = 1024
ROWS = 64
"""Most requests in one step, where nothing says otherwise."""
AUTO = "auto"
"""As `memory`: pool and rows as past load would have needed them."""
_UNITS = {
    unit: base ** (power + 1)
    for base, units in ((1000, ("kB", "MB", "GB", "TB")), (1024, ("KiB", "MiB", "GiB", "TiB")))
    for power, unit in enumerate(units)
} | {"": 1, "B": 1}
MOST_MS = 10**9
"""Longest time of any option: eleven days. What waits, waits by the system's clock, which ends somewhere."""
MAX_WAIT_MS = 100
"""`max_wait_ms` where the policy is dynamic and nothing else is said."""


def option(default: Any, help: str) -> Any:
    """A dataclass field with its default and its help text."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The paged KV cache."""

    kv_format: str = option("bf16", f"number format of cached keys and values: {', '.join(KV_FORMATS)}")
    prefix_cache: bool = option(
        True, "keep the keys and values of prompts and answers for requests that begin alike; the answers are the same"
    )
    pin_prefix: str | None = option(
        None, "file with a text, or messages as JSON, whose keys and values are computed at the start and always kept"
    )
    cache_dir: str | None = option(
        None, "folder for cached keys and values that the pool has no room for; they outlive the process"
    )
    cache_dir_bytes: int = option(10_000_000_000, "most bytes of `cache_dir`")
    pool_bytes: int | None = option(
        None, "bytes of the KV pool; default: what `rows` full contexts need, as far as the memory plan has room"
    )


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Who runs next."""

    budget: int = option(
        512, "most tokens computed in one step, prompts and answers together, whatever `step_ms` allows"
    )
    step_ms: int | None = option(
        None,
        "milliseconds a step should last at most; default: twice as long as without prompts, and 15; "
        "750 where nobody is answering",
    )
    rows: int | None = option(
        None, f"most requests in one step; default: {ROWS}, with memory {AUTO} as past load needed"
    )
    policy: str = option(
        "continuous",
        f"when requests begin: {', '.join(POLICIES)}; at any step, or in batches that run to their end, each of which "
        "begins when it is full (static), or is full or has waited long enough (dynamic)",
    )
    batch_size: int | None = option(None, "requests of a batch, for policies static and dynamic; default: `rows`")
    max_wait_ms: int | None = option(
        None, f"milliseconds the first request of a batch waits at most, for policy dynamic; default: {MAX_WAIT_MS}"
    )
    queue_requests: int = option(1024, "most requests that wait in the queue; the server refuses more (429)")
    queue_tokens: int = option(
        1_000_000, "most tokens of prompts that wait in the queue; the server refuses more (429)"
    )

    @property
    def batch(self) -> int:
        """Requests of a batch, where past load does not say how many rows there are."""
        return self.batch_size or self.rows or ROWS


@dataclass(frozen=True, slots=True)
class ExecuteOptions:
    """Who computes."""

    backend: str = option(
        "native", f"who computes: {', '.join(BACKENDS)} (the reference; needs the extra of that name)"
    )
    threads: int | None = option(
        None, "compute threads; default: the cores this process was granted, one for each physical core from four on"
    )
    isa: str | None = option(
        None, f"instruction set of the native kernels: {', '.join(ISAS)}; default: the machine's best, but not amx"
    )
    fusion: bool = option(True, "group the program's operations; off only for measuring, the results are the same")


@dataclass(frozen=True, slots=True)
class LoadingOptions:
    """How weights come into memory."""

    weight_cache: bool = option(True, "keep packed weights on disk, so that the next start need not pack them")
    weight_cache_bytes: int = option(
        20_000_000_000, "most bytes of disk for packed weights of all models; never more than half of what is free"
    )


@dataclass(frozen=True, slots=True)
class Options:
    """All options of one engine."""

    context: int | None = option(None, "longest prompt plus answer in tokens; default: what the model was trained for")
    memory: str | None = option(
        None,
        f"most memory of the whole process, as 6GiB or 6000MB; {AUTO}: pool and rows as past load needed; default: "
        "what is free, half of what is left of it for the KV pool",
    )
    past_load: bool = option(
        True, f"keep how long requests were and how many came at once, never their texts, for memory {AUTO}"
    )
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    execute: ExecuteOptions = field(default_factory=ExecuteOptions)
    loading: LoadingOptions = field(default_factory=LoadingOptions)

    def __post_init__(self) -> None:
        _positive("context", self.context)
        _ = self.memory_bytes
        _flag("past_load", self.past_load)
        _positive("pool_bytes", self.cache.pool_bytes)
        _positive("budget", self.scheduler.budget)
        _positive("step_ms", self.scheduler.step_ms, MOST_MS)
        _positive("rows", self.scheduler.rows)
        _judge_turns(self.scheduler)
        _positive("threads", self.execute.threads, MOST_THREADS)
        _flag("prefix_cache", self.cache.prefix_cache)
        _positive("cache_dir_bytes", self.cache.cache_dir_bytes)
        if self.cache.pin_prefix is not None and not self.cache.prefix_cache:
            raise OptionError("pin_prefix stays in the prefix cache, but prefix_cache is off", "pin_prefix")
        if self.cache.cache_dir is not None and not self.cache.prefix_cache:
            raise OptionError("cache_dir keeps what the prefix cache holds, but prefix_cache is off", "cache_dir")
        _flag("fusion", self.execute.fusion)
        _flag("weight_cache", self.loading.weight_cache)
        _positive("weight_cache_bytes", self.loading.weight_cache_bytes)
        _one_of("kv_format", self.cache.kv_format, KV_FORMATS)
        _one_of("backend", self.execute.backend, BACKENDS)
        if self.execute.isa is not None:
            _one_of("isa", self.execute.isa, ISAS)
            if self.execute.backend != "native":
                raise OptionError(f"isa is of backend native, but backend is {self.execute.backend}", "isa")

    @property
    def memory_bytes(self) -> int | None:
        """Of the option `memory`; None where it bounds nothing. OptionError."""
        return None if self.memory in (None, AUTO) else _size("memory", self.memory)

    @property
    def automatic(self) -> bool:
        """Whether past load sizes pool and rows."""
        return self.memory == AUTO

    @classmethod
    def of(cls, **flat: Any) -> Options:
        """Options from a flat set of names, as the command line and `LLM(...)` give them. Unknown names are refused."""
        parts: dict[str, type] = {
            "cache": CacheOptions,
            "scheduler": SchedulerOptions,
            "execute": ExecuteOptions,
            "loading": LoadingOptions,
        }
        whole = [f.name for f in fields(cls) if f.name not in parts]
        known = {f.name: part for part, kind in parts.items() for f in fields(kind)} | dict.fromkeys(whole, "")
        if unknown := sorted(set(flat) - set(known)):
            raise OptionError(f"unknown option {unknown[0]!r}; known are: {', '.join(sorted(known))}", unknown[0])
        values = {part: kind(**{n: v for n, v in flat.items() if known[n] == part}) for part, kind in parts.items()}
        return cls(**{name: flat[name] for name in whole if name in flat}, **values)


def _judge_turns(options: SchedulerOptions) -> None:
    _one_of("policy", options.policy, POLICIES)
    _positive("max_wait_ms", options.max_wait_ms, MOST_MS)
    for name in ("batch_size", "queue_requests", "queue_tokens"):
        _positive(name, getattr(options, name))
    if options.batch_size is not None and options.policy == "continuous":
        raise OptionError("batch_size is of policies static and dynamic, but policy is continuous", "batch_size")
    if options.max_wait_ms is not None and options.policy != "dynamic":
        raise OptionError(f"max_wait_ms is of policy dynamic, but policy is {options.policy}", "max_wait_ms")
    if options.batch > (rows := options.rows or ROWS):
        raise OptionError(
            f"batch_size is {options.batch}, more than the {rows} requests of a step (rows)", "batch_size"
        )
    if options.policy != "continuous" and options.queue_requests < options.batch:
        raise OptionError(
            f"queue_requests is {options.queue_requests}, but a batch of policy {options.policy} is full with "
            f"{options.batch} (batch_size)",
            "queue_requests",
        )


def _positive(name: str, value: object, most: int | None = None) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise OptionError(f"{name} must be a whole number of at least 1, not {shown(value)}", name)
    if most is not None and value > most:
        raise OptionError(f"{name} must be at most {most}, not {shown(value)}", name)


def _size(name: str, value: object) -> int:
    """Bytes of a size like 6GiB, 1.5 GB or 6000000000."""
    told = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([a-zA-Z]*)\s*", str(value), re.ASCII)
    unit = told and next((times for unit, times in _UNITS.items() if unit.lower() == told[2].lower()), None)
    nbytes = int(Fraction(told[1]) * unit) if told and unit else 0
    if isinstance(value, bool) or nbytes < 1:
        raise OptionError(
            f"{name} must be a size like 6GiB, 6000MB or 6000000000 (bytes), or {AUTO}, not {shown(value)}", name
        )
    return nbytes


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise OptionError(f"{name} must be True or False, not {value!r}", name)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise OptionError(f"{name} must be one of {', '.join(known)}, not {value!r}", name)
