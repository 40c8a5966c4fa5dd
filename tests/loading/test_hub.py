"""The hub, against a stand-in on 127.0.0.1 that speaks what huggingface_hub asks. Each pull is a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

LARGE = 10_000
"""Bytes from which on a file is kept apart (LFS), as the hub does."""
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def content(name: str, size: int = 3_000_000) -> bytes:
    return b"GGUF" + hashlib.shake_128(name.encode()).digest(size - 4)


@dataclass
class Repo:
    files: dict[str, bytes]
    commit: str = COMMIT
    refusal: tuple[int, str] | None = None
    """Status and error code for who has no token "good"."""


@dataclass
class Hub:
    """Two servers: the hub, and the storage that it sends large files' readers to."""

    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    """Method, path and headers, in order."""
    cuts: list[int] = field(default_factory=list)
    """Each answer of the storage breaks off after so many bytes, while there are entries."""
    stalls: bool = False
    """After a cut the storage holds the connection open and sends nothing more."""
    ignores_ranges: bool = False
    wrong: bool = False
    """The storage sends other bytes of the right number."""
    too_much: bool = False
    broken: int | None = None
    """Status that the hub answers everything with."""

    def __post_init__(self) -> None:
        self.servers = [ThreadingHTTPServer(("127.0.0.1", 0), _handler(self, storage=s)) for s in (False, True)]
        for server in self.servers:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        self.url, self.storage = (f"http://127.0.0.1:{s.server_address[1]}" for s in self.servers)

    def close(self) -> None:
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def fetched(self) -> list[str]:
        """Names of the files whose content was asked for, in order."""
        paths = [path for method, path, _ in self.requests if method == "GET"]
        return [p.split("/", 5)[5] for p in paths if "/resolve/" in p]

    def ranges(self) -> list[str]:
        return [h.get("range", "") for _, path, h in self.requests if path.startswith("/storage/")]


def _handler(hub: Hub, *, storage: bool) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            headers = {k.lower(): v for k, v in self.headers.items()}
            path = self.path.split("?")[0]
            hub.requests.append((self.command, path, headers))
            if storage:
                self.send_stored(path.rsplit("/", 1)[1], headers)
            elif hub.broken is not None:
                self.send(hub.broken, b"<html>")
            else:
                self.send_hub(path, headers)

        def send_hub(self, path: str, headers: dict[str, str]) -> None:
            api = path.startswith("/api/models/")
            # /api/models/org/name/revision/main, or /org/name/resolve/main/folder/file
            org, model, _, revision, *file = path.removeprefix("/api/models/").strip("/").split("/")
            repo = hub.repos.get(f"{org}/{model}")
            if repo is None:
                return self.send(404 if "authorization" in headers else 401, b"{}", **{"X-Error-Code": "RepoNotFound"})
            if repo.refusal and headers.get("authorization") != "Bearer good":
                status, code = repo.refusal
                return self.send(status, b"{}", **({"X-Error-Code": code} if code else {}))
            if revision not in ("main", repo.commit):
                return self.send(404, b"", **{"X-Error-Code": "RevisionNotFound"})
            if api:
                siblings = [_sibling(n, c) for n, c in repo.files.items()]
                return self.send(200, json.dumps({"id": model, "sha": repo.commit, "siblings": siblings}).encode())
            if (name := "/".join(file)) not in repo.files:
                return self.send(404, b"", **{"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repo.commit})
            data = repo.files[name]
            if len(data) < LARGE:
                return self.send(
                    200, data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', **{"X-Repo-Commit": repo.commit}
                )
            digest = hashlib.sha256(data).hexdigest()
            extra = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data)), "X-Repo-Commit": repo.commit}
            return self.send(302, b"", Location=f"{hub.storage}/storage/{digest}", **extra)

        def send_stored(self, digest: str, headers: dict[str, str]) -> None:
            files = [c for r in hub.repos.values() for c in r.files.values()]
            data = next(c for c in files if hashlib.sha256(c).hexdigest() == digest)
            data = bytes(len(data)) if hub.wrong else data + bytes(5000) if hub.too_much else data
            start, extra, status = 0, {}, 200
            if (span := headers.get("range")) and not hub.ignores_ranges:
                start = int(span.removeprefix("bytes=").split("-")[0])
                extra, status = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}, 206
            cut = hub.cuts.pop(0) if hub.cuts else None
            self.send(status, data[start:], cut=cut, **extra)

        def send(self, status: int, body: bytes, *, cut: int | None = None, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "HEAD":
                return
            self.wfile.write(body[:cut])
            if cut is not None:
                self.wfile.flush()
                while hub.stalls:
                    time.sleep(0.02)
                self.close_connection = True

    return Handler


def _sibling(name: str, data: bytes) -> dict[str, Any]:
    if len(data) < LARGE:
        return {"rfilename": name, "size": len(data), "blobId": hashlib.sha1(data).hexdigest()}
    lfs = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return {"rfilename": name, "size": len(data), "blobId": hashlib.sha1(data).hexdigest(), "lfs": lfs}


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    yield made
    made.stalls = False
    made.close()


PULL = """
import json, sys
from pathlib import Path
from headrace.errors import HeadraceError
from headrace.loading import download, hub, resolve
{setup}
told = []
try:
    path = resolve.resolve(sys.argv[1], progress=lambda *t: told.append(t))
    print(json.dumps({{"path": str(path), "told": told}}))
except HeadraceError as e:
    print(json.dumps({{"error": type(e).__name__, "message": str(e)}}))
"""


class Machine:
    """A machine with a cache of its own, at which models are pulled from the stand-in."""

    def __init__(self, hub: Hub, home: Path) -> None:
        self.hub = hub
        self.cache = home / "hub"
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
        self.env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HEADRACE_CACHE": str(home / "own")}
        self.env |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}

    def start(self, model: str, setup: str = "", **env: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PULL.format(setup=setup), model]
        return subprocess.Popen(
            command,
            env=self.env | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.cache.parent,
        )

    def pull(self, model: str, setup: str = "", **env: str) -> dict[str, Any]:
        process = self.start(model, setup, **env)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        return json.loads(out) | {"stderr": err}

    def path(self, model: str, setup: str = "", **env: str) -> Path:
        answer = self.pull(model, setup, **env)
        assert "path" in answer, answer
        return Path(answer["path"])

    def refusal(self, model: str, setup: str = "", **env: str) -> str:
        """The error; nothing in the cache may look whole."""
        answer = self.pull(model, setup, **env)
        assert "error" in answer, answer
        return f"{answer['error']}: {answer['message']}"

    def files(self) -> set[str]:
        """What lies in the cache, but for locks and tags."""
        found = {p.relative_to(self.cache).as_posix() for p in self.cache.rglob("*") if not p.is_dir()}
        return {f for f in found if not f.startswith(".locks/") and not f.endswith("CACHEDIR.TAG")}


@pytest.fixture
def machine(hub: Hub, tmp_path: Path) -> Machine:
    (tmp_path / "home").mkdir()
    return Machine(hub, tmp_path / "home")


SMALL = {"README.md": b"read me", "config.json": b"{}"}
QUANTS = {f"m-{q}.gguf": content(q) for q in ("Q2_K", "Q4_K_M", "Q8_0")}
SHARDS = {f"model-0000{i}-of-00002.safetensors": content(f"shard{i}") for i in (1, 2)}
INDEX = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}})
FOLDER = {
    **SMALL,
    **SHARDS,
    "model.safetensors.index.json": INDEX.encode(),
    "tokenizer.json": content("tokenizer", 50_000),
    "tokenizer_config.json": b"{ }",
    "generation_config.json": b"{  }",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model-00001-of-00001.bin": content("bin"),
    "consolidated.safetensors": content("consolidated"),
    "onnx/model.onnx": content("onnx"),
    "original/params.json": b"{}",
}
NEEDED = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    *SHARDS,
}


# choosing


def test_the_default_type_and_nothing_else_is_fetched(hub: Hub, machine: Machine) -> None:
    hub.repos["org/repo"] = Repo({"README.md": b"read me", **QUANTS})
    answer = machine.pull("org/repo")
    path = Path(answer["path"])
    assert path == machine.cache / "models--org--repo" / "snapshots" / COMMIT / "m-Q4_K_M.gguf"
    assert path.read_bytes() == QUANTS["m-Q4_K_M.gguf"]
    assert hub.fetched() == ["m-Q4_K_M.gguf"]
    assert answer["told"][-1] == ["downloading org/repo", 3_000_000, 3_000_000]
    assert answer["stderr"] == ""
    assert not any(f.endswith((".incomplete", ".tmp")) for f in machine.files())
    seen = len(hub.requests)
    assert machine.path("org/repo") == path
    assert [m + " " + p for m, p, _ in hub.requests[seen:]] == ["GET /api/models/org/repo/revision/main"]


@pytest.mark.parametrize("want", ["q8_0", "Q8_0", "m-Q8_0.gguf", "M-Q8_0"])
def test_a_named_type_or_file(hub: Hub, machine: Machine, want: str) -> None:
    hub.repos["org/repo"] = Repo(QUANTS)
    assert machine.path(f"org/repo:{want}").name == "m-Q8_0.gguf"
    assert hub.fetched() == ["m-Q8_0.gguf"]


def test_what_is_not_there_lists_what_is(hub: Hub, machine: Machine) -> None:
    hub.repos["org/repo"] = Repo(QUANTS | {"b-Q8_0.gguf": content("b")})
    assert "no file or type 'Q6_K'; it has: b-Q8_0.gguf, m-Q2_K.gguf" in machine.refusal("org/repo:Q6_K")
    assert "fits several files of org/repo; name one of: b-Q8_0.gguf, m-Q8_0.gguf" in machine.refusal("org/repo:q8_0")
    hub.repos["org/repo"] = Repo({"pytorch_model.bin": content("bin"), "config.json": b"{}"})
    assert "neither config.json with safetensors nor GGUF" in machine.refusal("org/repo")
    hub.repos["org/repo"] = Repo(FOLDER)
    assert "has no GGUF files; leave `:Q8_0` out" in machine.refusal("org/repo:Q8_0")
    assert hub.fetched() == []


def test_a_folder_with_its_shards_and_nothing_else(hub: Hub, machine: Machine) -> None:
    hub.repos["org/repo"] = Repo(FOLDER)
    path = machine.path("org/repo")
    assert {p.name for p in path.iterdir()} == NEEDED
    assert all((path / n).read_bytes() == FOLDER[n] for n in NEEDED)
    assert set(hub.fetched()) == NEEDED


def test_safetensors_go_before_gguf_unless_named(hub: Hub, machine: Machine) -> None:
    hub.repos["org/repo"] = Repo({**SMALL, **QUANTS, "model.safetensors": content("single")})
    folder = machine.path("org/repo")
    assert {p.name for p in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert machine.path("org/repo:q4_k_m") == folder / "m-Q4_K_M.gguf"


def test_a_split_file_comes_with_all_its_parts(hub: Hub, machine: Machine) -> None:
    parts = {f"big/x-Q8_0-0000{i}-of-00003.gguf": content(f"part{i}", 100_000) for i in (1, 2, 3)}
    hub.repos["org/repo"] = Repo({**QUANTS, **parts, "x-Q6_K-00001-of-00002.gguf": content("lonely")})
    path = machine.path("org/repo:big/x-Q8_0-00002-of-00003.gguf")
    assert path.name == "x-Q8_0-00001-of-00003.gguf"
    assert sorted(p.name for p in path.parent.iterdir()) == [n.split("/")[1] for n in parts]
    assert "lacks a part of x-Q6_K-00001-of-00002.gguf: x-Q6_K-00002-of-00002.gguf" in machine.refusal("org/repo:q6_k")


# refusals


def test_refusals_say_what_to_do(hub: Hub, machine: Machine) -> None:
    hub.repos["org/gated"] = Repo(QUANTS, refusal=(403, "GatedRepo"))
    hub.repos["org/private"] = Repo(QUANTS, refusal=(404, "RepoNotFound"))
    hub.repos["org/banned"] = Repo(QUANTS, refusal=(403, ""))
    absent = machine.refusal("org/absent")
    assert absent == (
        f"ModelNotFoundError: no model org/absent on {hub.url}, or it is private: "
        "then log in with `hf auth login` or set HF_TOKEN"
    )
    gated = machine.refusal("org/gated")
    assert gated.startswith(f"ModelNotFoundError: org/gated is gated: accept its terms at {hub.url}/org/gated")
    assert "your token may not see it" in machine.refusal("org/private", HF_TOKEN="bad")
    assert "forbids org/banned (403)" in machine.refusal("org/banned")
    assert machine.refusal("a--b/c").startswith("ModelNotFoundError: 'a--b/c' is no name of a hub repo")
    assert machine.files() == set()
    assert machine.path("org/gated", HF_TOKEN="good").name == "m-Q4_K_M.gguf"


def test_the_token_does_not_go_to_the_storage(hub: Hub, machine: Machine) -> None:
    hub.repos["org/repo"] = Repo(QUANTS, refusal=(401, "RepoNotFound"))
    machine.path("org/repo", HF_TOKEN="good")
    tokens = {path.split("/")[1]: headers.get("authorization") for _, path, headers in hub.requests}
    assert tokens == {"api": "Bearer good", "org": "Bearer good", "storage": None}


def test_names_that_leave_the_folder_are_refused(hub: Hub, machine: Machine) -> None:
    for name in ("../../../../evil-Q4_K_M.gguf", "/tmp/evil-Q4_K_M.gguf", "a/../../evil.gguf"):
        hub.repos["org/repo"] = Repo({name: content("evil")})
        assert "which is no plain name; refused" in machine.refusal("org/repo")
    evil = json.dumps({"weight_map": {"a": "../../../../../evil.safetensors"}}).encode()
    hub.repos["org/repo"] = Repo({**FOLDER, "model.safetensors.index.json": evil})
    assert "which is no plain name; refused" in machine.refusal("org/repo")
    absent = json.dumps({"weight_map": {"a": "absent.safetensors"}}).encode()
    hub.repos["org/repo"] = Repo({**FOLDER, "model.safetensors.index.json": absent}, commit="a" * 40)
    assert "lacks absent.safetensors" in machine.refusal("org/repo")
    assert list(machine.cache.parent.parent.rglob("*evil*")) == []


@pytest.mark.parametrize("index", [b"{", b"[]", b'{"weight_map": 3}', b'{"weight_map": {"a": {}}}'])
def test_a_broken_index_is_named(hub: Hub, machine: Machine, index: bytes) -> None:
    hub.repos["org/repo"] = Repo({**FOLDER, "model.safetensors.index.json": index})
    assert "model.safetensors.index.json is broken" in machine.refusal("org/repo")


def test_what_answers_must_be_a_hub(hub: Hub, machine: Machine) -> None:
    hub.broken = 200
    assert "is HF_ENDPOINT a hub?" in machine.refusal("org/repo")
    hub.broken = 503
    assert "answered 503" in machine.refusal("org/repo")


def test_a_small_disk_is_told_before_the_download(hub: Hub, machine: Machine) -> None:
    hub.repos["org/repo"] = Repo(QUANTS)
    setup = "import shutil; hub.shutil.disk_usage = lambda at: shutil._ntuple_diskusage(9, 9, 2_000_000)"
    assert "needs 0.00 GB and" in machine.refusal("org/repo", setup)
    assert hub.fetched() == []


def test_a_disk_that_fills_up_keeps_what_came(hub: Hub, machine: Machine) -> None:
    hub.repos["org/repo"] = Repo(QUANTS)
    setup = """
add = download._Part.add
def fill(part, chunk):
    if part.size > 1_000_000:
        raise OSError(28, "No space left on device")
    add(part, chunk)
download._Part.add = fill
"""
    assert "no space left in" in machine.refusal("org/repo", setup)
    assert [Path(f).suffix for f in machine.files()] == [".incomplete"]
    assert machine.path("org/repo").read_bytes() == QUANTS["m-Q4_K_M.gguf"]
    assert hub.ranges()[1] != "bytes=0-"


# broken downloads


def test_a_broken_download_goes_on_in_the_same_run(hub: Hub, machine: Machine) -> None:
    hub.repos["org/repo"] = Repo(QUANTS)
    hub.cuts = [1_500_000, 700_000, 0]
    assert machine.path("org/repo").read_bytes() == QUANTS["m-Q4_K_M.gguf"]
    starts = [int(r.removeprefix("bytes=").strip("-")) for r in hub.ranges()]
    assert len(starts) == 4
    assert starts[0] == 0
    assert starts[1] > 0
    assert starts[2] > starts[1]
    assert starts[3] == starts[2]


def test_a_killed_download_goes_on_in_the_next_run(hub: Hub, machine: Machine) -> None:
    hub.repos["org/repo"] = Repo(QUANTS)
    hub.cuts, hub.stalls = [2_500_000], True
    process = machine.start("org/repo")
    deadline = time.monotonic() + 30
    while not any((machine.cache / f).stat().st_size >= 2_000_000 for f in machine.files()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    hub.stalls = False
    digest = hashlib.sha256(QUANTS["m-Q4_K_M.gguf"]).hexdigest()
    assert machine.files() == {f"models--org--repo/blobs/{digest}.incomplete"}
    kept = (machine.cache / f"models--org--repo/blobs/{digest}.incomplete").stat().st_size
    assert "not in the hub's cache" in machine.refusal("org/repo", HF_HUB_OFFLINE="1")
    assert machine.path("org/repo").read_bytes() == QUANTS["m-Q4_K_M.gguf"]
    assert hub.ranges() == ["bytes=0-", f"bytes={kept}-"]
    assert not any(f.endswith(".incomplete") for f in machine.files())


def test_a_storage_that_ignores_ranges_starts_over(hub: Hub, machine: Machine) -> None:
    hub.repos["org/repo"] = Repo(QUANTS)
    hub.cuts, hub.ignores_ranges = [1_500_000], True
    assert machine.path("org/repo").read_bytes() == QUANTS["m-Q4_K_M.gguf"]
    assert len(hub.ranges()) == 2


def test_a_download_that_never_moves_is_given_up(hub: Hub, machine: Machine) -> None:
    hub.repos["org/repo"] = Repo(QUANTS)
    hub.cuts = [0] * 10
    message = machine.refusal("org/repo", "download.ATTEMPTS = 2")
    assert "cannot reach" in message
    assert len(hub.ranges()) == 2


def test_wrong_content_is_removed(hub: Hub, machine: Machine) -> None:
    hub.repos["org/repo"] = Repo(QUANTS)
    hub.wrong = True
    message = machine.refusal("org/repo")
    assert "expected" in message
    assert "it was removed" in message
    assert machine.files() == set()
    hub.wrong, hub.too_much = False, True
    assert "sends more than the 3000000 bytes" in machine.refusal("org/repo")
    hub.too_much = False
    assert machine.path("org/repo").read_bytes() == QUANTS["m-Q4_K_M.gguf"]


def test_two_processes_download_once(hub: Hub, machine: Machine) -> None:
    hub.repos["org/repo"] = Repo(FOLDER)
    both = [machine.start("org/repo") for _ in range(2)]
    answers = [json.loads(p.communicate(timeout=60)[0]) for p in both]
    assert answers[0]["path"] == answers[1]["path"]
    large = [n for n in NEEDED if len(FOLDER[n]) >= LARGE]
    assert len(hub.ranges()) == len(large)


# without the network


def test_offline_uses_what_is_cached_and_no_network(hub: Hub, machine: Machine) -> None:
    hub.repos["org/repo"] = Repo(QUANTS)
    hub.repos["org/folder"] = Repo(FOLDER)
    online = [machine.path("org/repo:q8_0"), machine.path("org/folder")]
    seen = len(hub.requests)
    offline = {"HF_HUB_OFFLINE": "1"}
    assert [machine.path("org/repo:Q8_0", **offline), machine.path("org/folder", **offline)] == online
    assert machine.path("org/repo", **offline) == online[0]
    assert "no file or type 'Q2_K'; it has: m-Q8_0.gguf" in machine.refusal("org/repo:Q2_K", **offline)
    assert "unset HF_HUB_OFFLINE to download it" in machine.refusal("org/other", **offline)
    (online[1] / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors must be downloaded" in machine.refusal("org/folder", **offline)
    assert len(hub.requests) == seen


def test_a_hub_that_is_down_leaves_the_cache(hub: Hub, machine: Machine) -> None:
    hub.repos["org/repo"] = Repo(QUANTS)
    path = machine.path("org/repo")
    hub.broken = 503
    answer = machine.pull("org/repo")
    assert answer["path"] == str(path)
    assert "using the copy in the cache" in answer["stderr"]
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    assert machine.path("org/repo", **nowhere) == path
    message = machine.refusal("org/other", **nowhere)
    assert message.startswith("HeadraceError: cannot reach http://127.0.0.1:9 (")
    assert "org/other is not in the hub's cache" in message


def test_a_new_commit_is_followed(hub: Hub, machine: Machine) -> None:
    hub.repos["org/repo"] = Repo({"m-Q4_K_M.gguf": content("old")})
    assert machine.path("org/repo").read_bytes() == content("old")
    hub.repos["org/repo"] = Repo({"m-Q4_K_M.gguf": content("new")}, commit="f" * 40)
    assert machine.path("org/repo").read_bytes() == content("new")
    assert machine.path("org/repo", HF_HUB_OFFLINE="1").read_bytes() == content("new")


# a pinned source of the catalogue

PINNED = """
from headrace.loading.catalogue import Entry
from headrace.loading.hub import HubSource
source = HubSource("org/repo", "m-Q8_0.gguf", revision="{commit}", sha256="{digest}")
resolve.find = lambda name: Entry("tiny", "tiny", (source,))
"""


def test_a_pinned_file(hub: Hub, machine: Machine) -> None:
    hub.repos["org/repo"] = Repo(QUANTS)
    digest = hashlib.sha256(QUANTS["m-Q8_0.gguf"]).hexdigest()
    wrong = PINNED.format(commit=COMMIT, digest="0" * 64)
    assert f"has SHA-256 {digest}, expected {'0' * 64}" in machine.refusal("tiny", wrong)
    assert hub.fetched() == []
    pinned = PINNED.format(commit=COMMIT, digest=digest)
    path = machine.path("tiny", pinned)
    seen = len(hub.requests)
    assert machine.path("tiny", pinned) == path
    assert len(hub.requests) == seen, "a commit that is cached needs no question"
    assert "no revision" in machine.refusal("tiny", PINNED.format(commit="e" * 40, digest=digest))


def test_the_cache_can_be_listed(hub: Hub, machine: Machine) -> None:
    hub.repos["org/repo"] = Repo(QUANTS)
    hub.repos["org/folder"] = Repo(FOLDER)
    machine.path("org/repo:q8_0")
    machine.path("org/folder")
    script = "from headrace.loading.hub import cached_models; [print(m.label, m.nbytes) for m in cached_models()]"
    listed = subprocess.run([sys.executable, "-c", script], env=machine.env, capture_output=True, text=True, check=True)
    assert listed.stdout.splitlines() == ["org/folder 6000000", "org/repo:m-Q8_0.gguf 3000000"]
