"""API keys: the file and its errors, who is let in, limits in tokens and requests, and that no key is ever told."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from headrace.errors import OptionError
from headrace.serve import keys as keys_module
from headrace.serve.key_file import Key, KeyFileError, digest_of, parsed
from headrace.serve.keys import Keys
from headrace.serve.limits import Bucket, Exceeded, KeyLimits
from headrace.serve.options import ServerOptions
from tests.serve.fake_llm import FakeLLM, Script
from tests.serve.http_api import CHAT, COMPLETIONS, error_of
from tests.serve.live_server import LiveServer, until

ALICE, BOB = "sk-alice-0123456789", "sk-bob-9876543210"
FILE = f"""
[keys.alice]
key = "{ALICE}"

[keys.bob]
sha256 = "{hashlib.sha256(BOB.encode()).hexdigest()}"
requests_per_minute = 3
tokens_per_minute = 100
concurrent = 2
"""
HELLO = [{"role": "user", "content": "hi"}]


def written(folder: Path, text: str = FILE) -> Path:
    file = folder / "keys.toml"
    file.write_text(text, encoding="utf-8")
    file.chmod(0o600)
    return file


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# ---- the file


def test_the_file(tmp_path: Path) -> None:
    alice, bob = parsed(FILE.encode(), tmp_path)
    assert alice == Key("alice", digest_of(ALICE))
    assert bob == Key("bob", digest_of(BOB), 3, 100, 2)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("[keys.a]\nkey = 'x", 2, "is not TOML"),
        ("[keys.a]\nkey = 'short'\n", 2, "8 to 512 printable"),
        ("[keys.a]\nkey = 'with a space in it'\n", 2, "printable"),
        ("[keys.a]\nsha256 = 'abc'\n", 2, "64 hexadecimal"),
        ("# c\n\n[keys.a]\nconcurrent = 1\n", 3, "needs one of key and sha256"),
        (f"[keys.a]\nkey = '{ALICE}'\nsha256 = '{'0' * 64}'\n", 1, "needs one of"),
        (f"[keys.b]\nkey = '{BOB}'\n[keys.a]\nkey = '{ALICE}'\nconcurrent = 0\n", 5, "from 1 to"),
        (f"[keys.a]\nkey = '{ALICE}'\nrequests_per_minute = true\n", 3, "from 1 to"),
        (f"[keys.a]\nkey = '{ALICE}'\nrequests = 3\n", 3, "unknown field 'requests'; known are key, sha256"),
        (f"[keys.a]\nkey = '{ALICE}'\n[keys.b]\nkey = '{ALICE}'\n", 3, "the same key as keys.a"),
        (f"[keys.'a b']\nkey = '{ALICE}'\n", 1, "is no name"),
        (f"[other]\nx = 1\n[keys.a]\nkey = '{ALICE}'\n", 1, "only tables"),
        ("[keys.a]\nkey = '\xff'\n", 2, "not UTF-8"),
        (f"[keys.a]\nkey = '{ALICE}'\nrequests_per_minute = {10**400}\n", 3, "from 1 to 1,000,000,000,000"),
    ],
)
def test_errors_name_the_line_and_tell_no_key(tmp_path: Path, text: str, line: int, words: str) -> None:
    with pytest.raises(KeyFileError, match=words) as caught:
        parsed(text.encode("latin-1"), tmp_path / "keys.toml")
    assert f"line {line}" in str(caught.value)
    assert ALICE not in str(caught.value)
    assert "short" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"), [("x = " + "[" * 100_000, "nested too deeply"), ("x = " + "1" * 5000, "is not TOML")]
)
def test_what_the_parser_gives_up_on_is_a_broken_file(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(KeyFileError, match=words):
        parsed(text.encode(), tmp_path / "keys.toml")


def test_many_keys_are_read_in_no_time(tmp_path: Path) -> None:
    """Not each compared with each: that would take minutes, on the event loop."""
    text = "".join(f"[keys.k{i}]\nkey = 'sk-{i:08}'\n" for i in range(20_000))
    start = time.perf_counter()
    assert len(parsed(text.encode(), tmp_path)) == 20_000
    assert time.perf_counter() - start < 10


def test_a_file_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    for text in ("", "[keys]\n", "[keys.a"):
        with pytest.raises(OptionError, match=r"api_key_file cannot be used: .*keys\.toml"):
            Keys(None, written(tmp_path, text))
    with pytest.raises(OptionError, match="No such file"):
        Keys(None, tmp_path / "none.toml")
    with pytest.raises(OptionError, match="choose another"):
        Keys(ALICE, written(tmp_path, f"[keys.default]\nkey = '{BOB}'\n"))


def test_a_file_that_everybody_can_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = written(tmp_path)
    Keys(None, file)
    assert not caplog.records
    file.chmod(0o644)
    Keys(None, file)
    assert "chmod 600" in caplog.text
    caplog.clear()
    hashed = written(tmp_path, f"[keys.a]\nsha256 = '{'0' * 64}'\n")
    hashed.chmod(0o644)
    Keys(None, hashed)
    assert not caplog.records, "what a digest stands for cannot be read"


def test_every_key_is_compared_whichever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: (compared.append(a), real(a, b))[1])
    keys = Keys("sk-own-own-own", written(tmp_path))
    for given in ("sk-own-own-own", ALICE, BOB, "nobody's", ""):
        compared.clear()
        keys.find(given)
        assert len(compared) == 3


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Keys, Path]:
    monkeypatch.setattr(keys_module, "LOOK_S", 0.0)
    file = written(tmp_path)
    os.utime(file, (1000, 1000))
    return Keys(None, file), file


def test_the_file_is_read_again_when_it_changes(watched: tuple[Keys, Path]) -> None:
    keys, file = watched
    assert keys.find(ALICE) is not None
    written(file.parent, FILE.replace("concurrent = 2", "concurrent = 5").replace(ALICE, ALICE + "x"))
    assert keys.find(ALICE) is None
    assert keys.find(ALICE + "x") is not None
    bob = keys.find(BOB)
    assert bob is not None
    assert bob.concurrent == 5
    replaced = file.with_suffix(".new")
    replaced.write_text(FILE, encoding="utf-8")
    replaced.rename(file)
    assert keys.find(ALICE) is not None


def test_an_unchanged_file_is_not_read(watched: tuple[Keys, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    keys, _ = watched
    monkeypatch.setattr(Keys, "_read", lambda *about: pytest.fail("read again"))
    for _ in range(3):
        assert keys.find(ALICE) is not None


def test_a_change_within_the_clocks_tick_is_seen(watched: tuple[Keys, Path]) -> None:
    """Same size, same time, same place: as where it is written twice within a few milliseconds."""
    keys, file = watched
    written(file.parent)
    assert keys.find(ALICE) is not None
    about = file.stat()
    written(file.parent, FILE.replace(ALICE, ALICE[::-1]))
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert keys.find(ALICE) is None


def test_a_broken_change_keeps_the_keys_and_is_told_once(
    watched: tuple[Keys, Path], caplog: pytest.LogCaptureFixture
) -> None:
    keys, file = watched
    for text, words in (("[keys.alice]\nkey = ", "line 2"), ("", "holds no keys")):
        caplog.clear()
        written(file.parent, text)
        for _ in range(3):
            assert keys.find(ALICE) is not None
        (record,) = caplog.records
        assert record.levelno == logging.ERROR
        assert words in record.getMessage()
    caplog.clear()
    file.unlink()
    for _ in range(3):
        assert keys.find(ALICE) is not None
    assert len(caplog.records) == 1
    assert keys.required
    written(file.parent, f"[keys.carol]\nkey = '{ALICE}'\n")
    found = keys.find(ALICE)
    assert found is not None
    assert found.name == "carol"


def test_a_pipe_in_the_files_place_holds_nobody_up(
    watched: tuple[Keys, Path], caplog: pytest.LogCaptureFixture
) -> None:
    keys, file = watched
    file.unlink()
    os.mkfifo(file)
    found: list[Key | None] = []
    thread = threading.Thread(target=lambda: found.append(keys.find(ALICE)), daemon=True)
    thread.start()
    thread.join(5)
    assert found == [Key("alice", digest_of(ALICE))]
    assert "no regular file" in caplog.text


def test_the_option_itself() -> None:
    assert ALICE not in repr(ServerOptions(api_key=ALICE))
    for bad in ("short", "with space", "ключ-ключ-ключ"):
        with pytest.raises(OptionError, match="printable") as caught:
            ServerOptions(api_key=bad)
        assert bad not in str(caught.value)


# ---- over HTTP


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[httpx.Client, FakeLLM, Path]]:
    file = written(tmp_path)
    llm = FakeLLM()
    with LiveServer(lambda: llm, api_key_file=str(file)) as live, httpx.Client(base_url=live.url, timeout=20) as http:
        until(lambda: http.get("/health").status_code == 200)
        yield http, llm, file


@pytest.mark.parametrize(
    "given",
    [
        None,
        "",
        "Bearer",
        "Bearer  x",
        ALICE,
        f"Basic {ALICE}",
        f"Bearer {ALICE}x",
        f"Bearer {ALICE[:-1]}",
        "Bearer ключ",
    ],
)
def test_401(served: tuple[httpx.Client, FakeLLM, Path], given: str | None) -> None:
    http, llm, _ = served
    headers: Any = {} if given is None else {"Authorization": given.encode()}
    for answer in (
        http.post(CHAT, json={"messages": HELLO}, headers=headers),
        http.post(COMPLETIONS, content=b"x" * 10_000, headers=headers),
        http.get("/v1/models", headers=headers),
        http.get("/metrics", headers=headers),
        http.get("/no/such/path", headers=headers),
    ):
        message = error_of(answer, 401)
        assert answer.json()["error"]["type"] == "authentication_error"
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "x-request-id" in answer.headers
        assert "alice" not in message
    for path in ("/health", "/live"):
        assert http.get(path, headers=headers).status_code == 200
    assert llm.submitted == []


def test_keys_open_and_name_their_tenant(served: tuple[httpx.Client, FakeLLM, Path]) -> None:
    http, llm, _ = served
    for key, kind in ((ALICE, "Bearer"), (BOB, "bearer")):
        headers = {"Authorization": f"{kind} {key}"}
        assert http.post(CHAT, json={"messages": HELLO, "max_tokens": 1}, headers=headers).status_code == 200
        assert http.get("/v1/models", headers=headers).status_code == 200
    assert llm.tenants == ["alice", "bob"]
    page = http.get("/metrics", headers=bearer(ALICE)).text
    assert 'headrace_key_tokens_total{key="bob",kind="generation"} 1.0' in page
    assert 'reason="invalid_api_key"' not in page


def test_the_official_client_sees_it(served: tuple[httpx.Client, FakeLLM, Path]) -> None:
    base = f"{served[0].base_url}/v1"
    with pytest.raises(openai.AuthenticationError, match="not known"):
        openai.OpenAI(base_url=base, api_key="sk-wrong", max_retries=0).models.list()
    assert openai.OpenAI(base_url=base, api_key=ALICE).models.list().data[0].id == "fake-model"


def test_a_key_of_the_command_line() -> None:
    with LiveServer(FakeLLM, api_key=ALICE, open_metrics=True) as live:
        live.wait_ready()
        assert httpx.get(live.url + "/v1/models").status_code == 401
        assert httpx.get(live.url + "/v1/models", headers=bearer(ALICE)).status_code == 200
        assert httpx.get(live.url + "/metrics").status_code == 200


def test_requests_per_minute(served: tuple[httpx.Client, FakeLLM, Path]) -> None:
    http, llm, _ = served
    ask = {"messages": HELLO, "max_tokens": 1}
    for left in (2, 1, 0):
        answer = http.post(CHAT, json=ask, headers=bearer(BOB))
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "3"
        assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
    refused = http.post(CHAT, json=ask, headers=bearer(BOB))
    message = error_of(refused, 429)
    assert "'bob'" in message
    assert "requests_per_minute = 3" in message
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 15 <= int(refused.headers["retry-after"]) <= 20
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-request-id"]
    assert http.get("/v1/models", headers=bearer(BOB)).status_code == 200, "only what computes counts"
    other = http.post(CHAT, json=ask, headers=bearer(ALICE))
    assert other.status_code == 200
    assert not [name for name in other.headers if name.startswith("x-ratelimit")]
    assert len(llm.submitted) == 4


def test_tokens_per_minute(served: tuple[httpx.Client, FakeLLM, Path]) -> None:
    """Prompt plus max_tokens is asked for; what was not used comes back."""
    http, llm, _ = served
    llm.says("hello world")  # two tokens and the end
    first = http.post(COMPLETIONS, json={"prompt": "x" * 10, "max_tokens": 80, "stream": True}, headers=bearer(BOB))
    assert first.headers["x-ratelimit-limit-tokens"] == "100"
    assert first.headers["x-ratelimit-remaining-tokens"] == "10", "while it runs"
    assert first.headers["x-ratelimit-reset-tokens"].endswith("s")
    again = http.post(COMPLETIONS, json={"prompt": "x" * 10, "max_tokens": 70}, headers=bearer(BOB))
    assert again.status_code == 200, again.text
    refused = http.post(COMPLETIONS, json={"prompt": "x" * 10, "n": 2, "max_tokens": 40}, headers=bearer(BOB))
    message = error_of(refused, 429)
    assert "tokens_per_minute = 100" in message
    assert "needs 90" in message
    assert 1 <= int(refused.headers["retry-after"]) <= 20
    assert len(llm.submitted) == 2


def test_embeddings_count_too(served: tuple[httpx.Client, FakeLLM, Path]) -> None:
    http, _, _ = served
    answer = http.post("/v1/embeddings", json={"input": ["x" * 10, "y" * 15]}, headers=bearer(BOB))
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-ratelimit-remaining-tokens"] == "75"
    again = http.post("/v1/embeddings", json={"input": "z" * 80}, headers=bearer(BOB))
    assert "needs 80" in error_of(again, 429)
    page = http.get("/metrics", headers=bearer(ALICE)).text
    assert 'headrace_key_tokens_total{key="bob",kind="prompt"} 25.0' in page


def test_concurrent(served: tuple[httpx.Client, FakeLLM, Path]) -> None:
    http, llm, _ = served
    llm.script = lambda prompt, choice: Script([120] * 40, 0.02)
    ask = {"prompt": "x", "max_tokens": 30}
    threads = [
        threading.Thread(target=http.post, args=(COMPLETIONS,), kwargs={"json": ask, "headers": bearer(BOB)})
        for _ in "ab"
    ]
    for thread in threads:
        thread.start()
    until(lambda: len(llm.submitted) == 2)
    refused = http.post(COMPLETIONS, json=ask, headers=bearer(BOB))
    assert "concurrent = 2" in error_of(refused, 429)
    assert refused.headers["retry-after"] == "1"
    for thread in threads:
        thread.join()
    assert http.post(COMPLETIONS, json=ask, headers=bearer(BOB)).status_code == 200


def test_clients_that_leave_give_back_what_they_asked_for(served: tuple[httpx.Client, FakeLLM, Path]) -> None:
    http, llm, _ = served
    llm.script = lambda prompt, choice: Script([120] * 400, 0.01)
    ask = {"prompt": "x", "max_tokens": 90, "stream": True}
    for _ in range(2):
        with httpx.stream("POST", f"{http.base_url}{COMPLETIONS}", json=ask, headers=bearer(BOB)) as response:
            assert response.status_code == 200
            next(response.iter_raw())
        until(lambda: all(stream.aborted for stream in llm.streams))


def test_a_removed_key_is_refused_at_once(
    served: tuple[httpx.Client, FakeLLM, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "LOOK_S", 0.0)
    http, _, file = served
    assert http.get("/v1/models", headers=bearer(BOB)).status_code == 200
    written(file.parent, FILE.partition("[keys.bob]")[0])
    assert http.get("/v1/models", headers=bearer(BOB)).status_code == 401
    assert http.get("/v1/models", headers=bearer(ALICE)).status_code == 200


# ---- the arithmetic of limits


def test_a_bucket_fills_evenly() -> None:
    bucket = Bucket(60, now=0.0)
    assert bucket.take(60, 0.0) == 0
    assert bucket.take(1, 0.5) == pytest.approx(0.5)
    assert bucket.take(1, 1.0) == 0
    assert bucket.level(1000.0) == 60
    assert bucket.full_in(1000.0) == 0


def test_more_than_a_minutes_worth_waits_for_a_full_bucket_and_leaves_a_debt() -> None:
    bucket = Bucket(60, now=0.0)
    assert bucket.take(100, 0.0) == 0
    assert bucket.level(0.0) == -40
    assert bucket.take(100, 40.0) == pytest.approx(60)
    bucket.give(30, 40.0)  # it used 70
    assert bucket.level(40.0) == pytest.approx(30)
    bucket.give(-50, 40.0)
    assert bucket.take(1, 40.0) == pytest.approx(21)


def test_over_time_nobody_has_more_than_the_limit() -> None:
    """A greedy client that comes back when it is told to, with requests that use less than they ask for."""
    limits, key, now, used = KeyLimits(), Key("k", b"", tokens_per_minute=6000), 0.0, 0
    while now < 3600:
        limits.begin(key, now)
        try:
            limits.charge(key, 5000, now)
        except Exceeded as error:
            limits.end(key, 0, 0, now)
            now += error.retry_s
            continue
        limits.end(key, 5000, 1700, now)
        used += 1700
    assert 0.95 < used / (6000 * 60) < 1.05


def test_another_limit_keeps_what_was_used() -> None:
    limits = KeyLimits()
    limits.begin(Key("k", b"", requests_per_minute=2), 0.0)
    limits.begin(Key("k", b"", requests_per_minute=2), 0.0)
    more = Key("k", b"", requests_per_minute=3)
    limits.begin(more, 0.0)
    with pytest.raises(Exceeded):
        limits.begin(more, 0.0)
    assert limits.headers(more, 0.0)["x-ratelimit-reset-requests"] == "1m0s"
    limits.begin(Key("k", b""), 0.0)


def test_who_began_before_the_limits_changed_moves_none_of_them() -> None:
    limits = KeyLimits()
    free, bound = Key("k", b""), Key("k", b"", tokens_per_minute=100)
    limits.begin(free, 0.0)
    assert limits.charge(free, 90, 0.0) == 0
    limits.begin(bound, 0.0)
    assert limits.charge(bound, 90, 0.0) == 90
    assert limits.headers(free, 0.0) == {}
    limits.end(free, 0, 0, 0.0)
    assert limits.headers(bound, 0.0)["x-ratelimit-remaining-tokens"] == "10"


def test_looking_at_the_file_is_cheap(tmp_path: Path) -> None:
    keys = Keys(None, written(tmp_path))
    start = time.perf_counter()
    for _ in range(2000):
        keys.find(ALICE)
    assert (time.perf_counter() - start) / 2000 < 0.0005
