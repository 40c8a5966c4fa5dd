"""Options, one frozen dataclass per part. Plain data: nothing here looks at the machine or at a model.

The command line is made from these fields: a field's metadata gives its help text.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from headrace.errors import OptionError

KV_FORMATS = ("f32", "bf16")
BACKENDS = ("native", "torch")
ISAS = ("portable", "avx2", "avx512", "amx")
MOST_THREADS = 1024


def option(default: Any, help: str) -> Any:
    """A dataclass field with its default and its help text."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The paged KV cache."""

    kv_format: str = option("bf16", f"number format of cached keys and values: {', '.join(KV_FORMATS)}")
    pool_bytes: int | None = option(
        None, "bytes of the KV pool; default: what `rows` full contexts need, at most a quarter of the free memory"
    )


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Who runs next."""

    budget: int = option(512, "most tokens computed in one step, prompts and answers together")
    rows: int = option(64, "most requests in one step")


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
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    execute: ExecuteOptions = field(default_factory=ExecuteOptions)
    loading: LoadingOptions = field(default_factory=LoadingOptions)

    def __post_init__(self) -> None:
        _positive("context", self.context)
        _positive("pool_bytes", self.cache.pool_bytes)
        _positive("budget", self.scheduler.budget)
        _positive("rows", self.scheduler.rows)
        _positive("threads", self.execute.threads)
        if self.execute.threads is not None and self.execute.threads > MOST_THREADS:
            raise OptionError(f"threads must be at most {MOST_THREADS}, not {self.execute.threads}", "threads")
        _flag("fusion", self.execute.fusion)
        _flag("weight_cache", self.loading.weight_cache)
        _positive("weight_cache_bytes", self.loading.weight_cache_bytes)
        _one_of("kv_format", self.cache.kv_format, KV_FORMATS)
        _one_of("backend", self.execute.backend, BACKENDS)
        if self.execute.isa is not None:
            _one_of("isa", self.execute.isa, ISAS)
            if self.execute.backend != "native":
                raise OptionError(f"isa is of backend native, but backend is {self.execute.backend}", "isa")

    @classmethod
    def of(cls, **flat: Any) -> Options:
        """Options from a flat set of names, as the command line and `LLM(...)` give them. Unknown names are refused."""
        parts: dict[str, type] = {
            "cache": CacheOptions,
            "scheduler": SchedulerOptions,
            "execute": ExecuteOptions,
            "loading": LoadingOptions,
        }
        known = {f.name: part for part, kind in parts.items() for f in fields(kind)} | {"context": ""}
        if unknown := sorted(set(flat) - set(known)):
            raise OptionError(f"unknown option {unknown[0]!r}; known are: {', '.join(sorted(known))}", unknown[0])
        values = {part: kind(**{n: v for n, v in flat.items() if known[n] == part}) for part, kind in parts.items()}
        return cls(context=flat.get("context"), **values)


def _positive(name: str, value: object) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise OptionError(f"{name} must be a whole number of at least 1, not {value!r}", name)


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise OptionError(f"{name} must be True or False, not {value!r}", name)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise OptionError(f"{name} must be one of {', '.join(known)}, not {value!r}", name)
