"""What the server counts, and how Prometheus reads it. Owns the numbers of one application; no state of the process.

Everything is written on the event loop, one addition or two for each chunk, and read there when somebody asks: no
locks. What the engine counts itself (`Stats`) is asked of it then. Names and their equals in vLLM: docs/metrics.md.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from headrace.scheduler.scheduler import Stats

PREFIX = "headrace_"
LAG_S = 0.05
"""How often the event loop is asked whether it is late."""

_STEP_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10, 30)
_REQUEST_S = (
    0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2.5, 5, 7.5, 10, 15, 20, 30, 45, 60, 120, 240, 480, 960, 1920,
)  # fmt: skip
_QUEUE_S = (0.001, 0.005, *_REQUEST_S)
_LAG_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 5)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000)


class Histogram:
    """Counts by upper bound, and the sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """`times` values like this one."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, int]]:
        """As Prometheus has them: each holds those before."""
        out, total = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            out.append(("+Inf" if bound == float("inf") else repr(float(bound)), total))
        return out


@dataclass(frozen=True, slots=True)
class EngineNow:
    """What is asked of the service when somebody reads."""

    model: str
    """The name under which it is served; empty while there is none."""
    stats: Stats | None
    ready: bool
    failures: int
    restarts: int


class Metrics:
    """The numbers of one application."""

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(_REQUEST_S)
        self.inter_token_latency = Histogram(_STEP_S)
        self.time_per_output_token = Histogram(_STEP_S)
        self.queue_time = Histogram(_QUEUE_S)
        self.prefill_time = Histogram(_REQUEST_S)
        self.decode_time = Histogram(_REQUEST_S)
        self.latency = Histogram(_REQUEST_S)
        self.prompt_tokens = Histogram(_TOKENS)
        self.generation_tokens = Histogram(_TOKENS)
        self.lag = Histogram(_LAG_S)
        self.finished: Counter[str] = Counter()
        """Choices by finish reason."""
        self.refused: Counter[str] = Counter()
        """HTTP requests that were refused, by the error's code."""
        self.answered: Counter[tuple[str, str, str]] = Counter()
        """HTTP requests by method, path and status."""
        self.by_key: Counter[tuple[str, str]] = Counter()
        """Tokens by the name of the API key and their kind."""
        self.under_way = 0
        """HTTP requests just now."""

    def exposition(self, engine: EngineNow, accept: str) -> tuple[bytes, str]:
        """The page, in the form that the reader asks for, and its content type."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Once([*self._own(engine.model), *_of_engine(engine)]))
        ProcessCollector(registry=registry)
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # a version that is no number
            encode, content_type = choose_encoder("")
        return encode(registry), content_type

    def _own(self, model: str) -> Iterator[Metric]:
        for name, text, histogram in (
            ("time_to_first_token_seconds", "from the request's arrival to a choice's first token",
             self.time_to_first_token),
            ("inter_token_latency_seconds", "between two tokens of a choice", self.inter_token_latency),
            ("request_time_per_output_token_seconds", "between the tokens of a choice, its mean",
             self.time_per_output_token),
            ("request_queue_time_seconds", "a choice's wait until the first step that computes some of it",
             self.queue_time),
            ("request_prefill_time_seconds", "from that step to a choice's first token", self.prefill_time),
            ("request_decode_time_seconds", "from a choice's first token to its last", self.decode_time),
            ("e2e_request_latency_seconds", "from the request's arrival to a choice's end", self.latency),
            ("request_prompt_tokens", "tokens of a prompt", self.prompt_tokens),
            ("request_generation_tokens", "tokens of a choice", self.generation_tokens),
        ):  # fmt: skip
            yield _histogram(name, text, histogram, model)
        yield _histogram("event_loop_lag_seconds", f"how late the event loop is, every {LAG_S} s", self.lag)
        yield _counter("request_success", "choices that ended, by reason", self.finished, ["finished_reason"], model)
        yield _counter("requests_refused", "HTTP requests refused, by the error's code", self.refused, ["reason"])
        yield _counter("http_requests", "HTTP requests answered", self.answered, ["method", "path", "status"])
        yield _counter("key_tokens", "tokens by API key", self.by_key, ["key", "kind"])
        yield _gauge("http_requests_running", "HTTP requests under way", self.under_way)


class _Once:
    """A collector of what was collected."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _of_engine(engine: EngineNow) -> Iterator[Metric]:
    yield _gauge("ready", "1 where requests are served, as /health tells", int(engine.ready))
    yield _counter("engine_failures", "times that the engine died", {(): engine.failures}, [])
    yield _counter("engine_restarts", "times that the model was loaded again", {(): engine.restarts}, [])
    stats, model = engine.stats, engine.model
    if stats is None:
        return
    for name, text, value in (
        ("num_requests_running", "choices that were admitted", stats.running),
        ("num_requests_waiting", "choices in the queue", stats.waiting),
        ("num_tokens_waiting", "tokens that the queue will compute", stats.waiting_tokens),
        ("kv_cache_usage_perc", "share of the KV blocks that requests hold; 1 is all", _share(stats)),
        ("kv_blocks", "blocks of the KV pool", stats.blocks_total),
        ("kv_blocks_used", "blocks that requests hold", stats.blocks_used),
        ("kv_blocks_idle", "blocks that only the prefix cache holds", stats.blocks_idle),
        ("kv_waste_ratio", "share of the allocated places for tokens that held none, over all steps", _waste(stats)),
    ):
        yield _gauge(name, text, value, model)
    for name, text, value in (
        ("prompt_tokens", "prompt tokens of the requests begun", stats.tokens_in),
        ("generation_tokens", "tokens generated", stats.tokens_out),
        ("engine_steps", "steps of the engine", stats.steps),
        ("num_preemptions", "choices preempted because the KV pool was full", stats.preemptions),
        ("request_aborts", "choices aborted: their client left, or the server ended them", stats.aborts),
        ("queue_refusals", "choices refused because the queue was full", stats.refused),
        ("prefix_cache_queries", "prompt tokens looked up in the prefix cache", stats.prefix_asked),
        ("prefix_cache_hits", "prompt tokens found there", stats.prefix_hits),
        ("kv_places", "places for tokens in the blocks held, summed over steps", stats.places),
        ("kv_places_filled", "those that held a token", stats.places_filled),
        ("tier_saves", "cached blocks put on disk", stats.tier_saves),
        ("tier_loads", "cached blocks read back from disk", stats.tier_loads),
    ):
        yield _counter(name, text, {(): value}, [], model)


def _share(stats: Stats) -> float:
    return stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0


def _waste(stats: Stats) -> float:
    return 1 - stats.places_filled / stats.places if stats.places else 0.0


def _labels(model: str | None) -> tuple[list[str], list[str]]:
    return ([], []) if model is None else (["model_name"], [model])


def _gauge(name: str, text: str, value: float, model: str | None = None) -> Metric:
    names, values = _labels(model)
    family = GaugeMetricFamily(PREFIX + name, text, labels=names)
    family.add_metric(values, value)
    return family


def _histogram(name: str, text: str, histogram: Histogram, model: str | None = None) -> Metric:
    names, values = _labels(model)
    family = HistogramMetricFamily(PREFIX + name, text, labels=names)
    family.add_metric(values, histogram.buckets(), histogram.sum)
    return family


def _counter(
    name: str,
    text: str,
    counts: Mapping[Any, int],
    labels: list[str],
    model: str | None = None,
) -> Metric:
    """`counts` by the values of `labels`: one, or a tuple."""
    names, values = _labels(model)
    family = CounterMetricFamily(PREFIX + name, text, labels=[*names, *labels])
    for key, count in counts.items():
        family.add_metric([*values, *((key,) if isinstance(key, str) else key)], count)
    return family


class LagSampler:
    """Asks the running event loop again and again how late it is."""

    def __init__(self, into: Histogram) -> None:
        self._into = into
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + LAG_S
        self._timer = self._loop.call_at(self._due, self._sample)

    def _sample(self) -> None:
        now = self._loop.time()
        self._into.observe(max(0.0, now - self._due))
        self._due = now + LAG_S
        self._timer = self._loop.call_at(self._due, self._sample)

    def stop(self) -> None:
        self._timer.cancel()
