"""/metrics: what Prometheus reads agrees with what was asked and answered, and is the application's own."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.serve.metrics import Histogram, Metrics
from headrace.serve.service import EngineNow
from tests.serve.fake_llm import FakeLLM, Script
from tests.serve.http_api import CHAT, COMPLETIONS
from tests.serve.live_server import LiveServer, until

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture
def served() -> Iterator[tuple[str, FakeLLM]]:
    llm = FakeLLM()
    with LiveServer(lambda: llm) as live:
        yield live.wait_ready().url, llm


def samples(url: str, **how: Any) -> dict[str, float]:
    """Every sample, its labels in the order of their names."""
    answer = httpx.get(url + "/metrics", **how)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    out = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "model_name")
            out[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return out


def test_tokens_choices_and_times(served: tuple[str, FakeLLM]) -> None:
    url, llm = served
    llm.says("hello world", step_s=0.02)
    before = samples(url)
    assert httpx.post(url + CHAT, json={"messages": HELLO, "n": 2, "max_tokens": 3}).status_code == 200
    assert httpx.post(url + COMPLETIONS, json={"prompt": "x", "max_tokens": 2, "stream": True}).status_code == 200
    prompts = sum(len(ids) for ids, _ in llm.submitted)
    got = {name: value - before.get(name, 0) for name, value in samples(url).items()}
    assert got["headrace_time_to_first_token_seconds_count"] == 3
    assert got["headrace_inter_token_latency_seconds_count"] == 2 + 2 + 1
    assert 5 * 0.015 < got["headrace_inter_token_latency_seconds_sum"] < 5
    assert got["headrace_request_time_per_output_token_seconds_count"] == 3
    assert got["headrace_e2e_request_latency_seconds_count"] == 3
    assert got["headrace_request_prompt_tokens_count"] == 2
    assert got["headrace_request_prompt_tokens_sum"] == prompts
    assert got["headrace_request_generation_tokens_sum"] == 3 + 3 + 2
    assert got["headrace_request_success_total{finished_reason=stop}"] == 2
    assert got["headrace_request_success_total{finished_reason=length}"] == 1
    assert got[f"headrace_http_requests_total{{method=POST,path={CHAT},status=200}}"] == 1
    assert got["headrace_prompt_tokens_total"] == prompts
    assert got["headrace_generation_tokens_total"] == 8


def test_what_the_engine_counts(served: tuple[str, FakeLLM]) -> None:
    url, _ = served
    got = samples(url)
    assert got["headrace_num_requests_running"] == 0
    assert got["headrace_num_requests_waiting"] == 3
    assert got["headrace_kv_cache_usage_perc"] == 0.25
    assert got["headrace_kv_blocks_idle"] == 7
    assert got["headrace_kv_waste_ratio"] == 0.25
    assert got["headrace_num_preemptions_total"] == 2
    assert got["headrace_prefix_cache_queries_total"] == 100
    assert got["headrace_prefix_cache_hits_total"] == 25
    assert (got["headrace_tier_saves_total"], got["headrace_tier_loads_total"]) == (4, 3)
    assert got["headrace_queue_refusals_total"] == 6
    assert got["headrace_ready"] == 1
    assert got["process_resident_memory_bytes"] > 10_000_000
    until(lambda: samples(url)["headrace_event_loop_lag_seconds_count"] > 3)
    page = httpx.get(url + "/metrics").text
    assert 'headrace_num_requests_waiting{model_name="fake-model"} 3.0' in page


def test_refusals_and_clients_that_leave(served: tuple[str, FakeLLM]) -> None:
    url, llm = served
    httpx.post(url + CHAT, json={"messages": HELLO, "temperature": -1})
    httpx.post(url + CHAT, content=b"{", headers={"content-type": "application/json"})
    httpx.get(url + "/no/such/path")
    llm.script = lambda prompt, choice: Script([120] * 400, 0.01)
    with httpx.stream("POST", url + CHAT, json={"messages": HELLO, "stream": True, "n": 2}) as response:
        kept = response.iter_raw()
        next(kept)
        assert samples(url)["headrace_http_requests_running"] == 2
    until(lambda: samples(url)["headrace_http_requests_running"] == 1)
    got = samples(url)
    assert got["headrace_requests_refused_total{reason=invalid_value}"] == 1
    assert got["headrace_requests_refused_total{reason=invalid_json}"] == 1
    assert got["headrace_http_requests_total{method=GET,path=other,status=404}"] == 1
    assert got["headrace_request_success_total{finished_reason=abort}"] == 2
    assert got["headrace_request_aborts_total"] == 1


def test_before_there_is_a_model() -> None:
    go = threading.Event()
    llm = FakeLLM()
    with LiveServer(lambda: (go.wait(10), llm)[1]) as live:
        got = samples(live.url)
        assert got["headrace_ready"] == 0
        assert "headrace_num_requests_running" not in got
        go.set()
        live.wait_ready()
        assert samples(live.url)["headrace_ready"] == 1


def test_applications_do_not_share_numbers() -> None:
    with LiveServer(FakeLLM) as one, LiveServer(FakeLLM) as other:
        for live in (one, other):
            live.wait_ready()
        httpx.post(one.url + CHAT, json={"messages": HELLO})
        assert samples(one.url)["headrace_e2e_request_latency_seconds_count"] == 1
        assert samples(other.url)["headrace_e2e_request_latency_seconds_count"] == 0


def test_open_metrics_form(served: tuple[str, FakeLLM]) -> None:
    answer = httpx.get(served[0] + "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


@pytest.mark.parametrize("accept", ["text/plain; version=x.y", "application/openmetrics-text; version=abc", ";=,"])
def test_a_form_that_nobody_knows_is_answered_as_text(served: tuple[str, FakeLLM], accept: str) -> None:
    answer = httpx.get(served[0] + "/metrics", headers={"Accept": accept})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")


def test_histograms_count_as_prometheus_does() -> None:
    histogram = Histogram((1, 2.5))
    for value in (0.5, 1, 1.5, 2.5, 3):
        histogram.observe(value)
    histogram.observe(2, times=4)
    assert histogram.buckets() == [("1.0", 2), ("2.5", 8), ("+Inf", 9)]
    assert histogram.sum == 0.5 + 1 + 1.5 + 2.5 + 3 + 8


def test_a_chunk_costs_next_to_nothing() -> None:
    histogram = Metrics().inter_token_latency
    start = time.perf_counter()
    for _ in range(20_000):
        histogram.observe(0.03)
    assert (time.perf_counter() - start) / 20_000 < 50e-6  # it takes one; 200 streams of 30 tokens a second are 6,000


def test_the_page_names_every_metric() -> None:
    text = PAGE.read_text(encoding="utf-8")
    page, _ = Metrics().exposition(EngineNow("m", FakeLLM().stats(), ready=True, failures=0, restarts=0), "")
    families = {family.name for family in text_string_to_metric_families(page.decode())}
    ours = {name for name in families if name.startswith("headrace_")}
    named = set(re.findall(r"`(headrace_[a-z0-9_]+)`", text))
    assert {name.removesuffix("_total") for name in named} == ours
