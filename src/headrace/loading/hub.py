"""Models on the Hugging Face hub: lists a repo, picks the files of one model, brings them into the hub's own cache.

huggingface_hub does the talking (its cache layout, tokens, endpoint and the other HF_* variables hold). Large files go
through `download` instead, because the library throws a broken download away: ours lies in `<digest>.incomplete`
beside the blob, is taken up where it broke, in this run or a later one, and becomes a blob only when its SHA-256 is
right. Knows no catalogue and opens no model.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError, ModelNotFoundError
from headrace.loading import choice
from headrace.loading.download import Unreachable, fill
from headrace.loading.files import locked
from headrace.loading.progress import Progress

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

log = logging.getLogger(__name__)

LARGEST_HTTP = 50 * 1000**3
"""Bytes; larger files are served in the hub's other protocol only and are left to huggingface_hub."""

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubSource:
    """A model on the hub, pinned as far as the fields say."""

    repo: str
    """org/name."""
    want: str | None = None
    """A file or a file type; None: what `fetch` picks."""
    revision: str = "main"
    """A branch, tag or commit. A commit that is in the cache is used without asking the hub."""
    sha256: str | None = None
    """Of the one file `want` names; another content is refused."""

    @property
    def label(self) -> str:
        return self.repo + (f":{self.want}" if self.want else "")


@dataclass(frozen=True, slots=True)
class _File:
    size: int | None
    sha256: str | None
    """Of large (LFS) files only."""


@dataclass(frozen=True, slots=True)
class _Listing:
    """What a repo holds at one commit."""

    commit: str
    files: Mapping[str, _File]


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model that is in the hub's cache."""

    label: str
    path: Path
    nbytes: int


def offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids the network."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def fetch(source: HubSource, progress: Progress) -> Path:
    """The model's first GGUF file or its folder, in the hub's cache, fetched as far as it is not there.

    A repo with config.json and safetensors is taken in that layout unless `want` names a GGUF file or type; of several
    GGUF files the first in `choice.QUANTS` is taken. Only the files of the chosen model are fetched. Offline, and where
    the hub cannot be reached, a model that is whole in the cache is used.

    ModelNotFoundError: no such repo or file, or not permitted, or offline and not cached. HeadraceError: connection,
    disk, or content that differs from its digest.
    """
    if offline() or _COMMIT.fullmatch(source.revision):
        try:
            return cached(source)
        except ModelNotFoundError:
            if offline():
                raise
    try:
        with _explained(source), _quiet():
            listing = _list(source)
            return _bring(source, listing, _Download(source.repo, listing, progress))
    except Unreachable as e:
        try:
            path = cached(source)
        except ModelNotFoundError as absent:
            raise HeadraceError(f"{e}; {absent}") from e
        log.warning("%s; using the copy in the cache, %s", e, path)
        return path


def cached(source: HubSource) -> Path:
    """The same without any network: ModelNotFoundError where the cache lacks the model or a part of it."""
    snapshot = _snapshot(source)
    names = _names_below(snapshot)
    try:
        return _bring(source, _Listing(snapshot.name, dict.fromkeys(names, _File(None, None))), _InCache(snapshot))
    except ModelNotFoundError as e:
        raise ModelNotFoundError(f"in the cache, {snapshot}: {e}") from e


def cached_models() -> list[CachedModel]:
    """What the hub's cache holds whole, in the form that MODEL takes."""
    from huggingface_hub import constants

    found = []
    for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*")):
        source = HubSource(folder.name.removeprefix("models--").replace("--", "/", 1))
        try:
            snapshot = _snapshot(source)
        except ModelNotFoundError:
            continue
        names = _names_below(snapshot)
        if choice.is_folder_model(names):
            size = sum((snapshot / n).stat().st_size for n in names if n.endswith(".safetensors"))
            found.append(CachedModel(source.repo, snapshot, size))
        for model in choice.gguf_models(names):
            if not model.missing:
                size = sum((snapshot / f).stat().st_size for f in model.files)
                found.append(CachedModel(f"{source.repo}:{model.name}", snapshot / model.name, size))
    return found


class _Download:
    """Gets files of one repo at one commit from the hub."""

    def __init__(self, repo: str, listing: _Listing, progress: Progress) -> None:
        self.repo = repo
        self.listing = listing
        self.progress = progress
        self.snapshot = _folder(repo) / "snapshots" / listing.commit

    def get(self, names: list[str]) -> Path:
        """The snapshot's folder, with these files in it."""
        from huggingface_hub import constants, hf_hub_download

        if gone := [n for n in names if n not in self.listing.files]:
            raise ModelNotFoundError(f"{self.repo} lacks {', '.join(gone[:3])}, which {choice.INDEX} names")
        absent = [n for n in names if not (self.snapshot / n).exists()]
        sizes = [self.listing.files[n].size or 0 for n in absent]
        _check_space(self.repo, Path(constants.HF_HUB_CACHE), sum(sizes) - sum(self._there(n) for n in absent))
        for i, name in enumerate(absent):
            tick = partial(self._tick, sum(sizes[:i]), sum(sizes))
            self._large(name, tick)
            hf_hub_download(self.repo, name, revision=self.listing.commit)
            tick(sizes[i])
        return self.snapshot

    def published(self, revision: str) -> None:
        """All is there: let the revision's name point to it, as huggingface_hub does, for offline use."""
        ref = _folder(self.repo) / "refs" / revision
        if revision == self.listing.commit or (ref.exists() and ref.read_text() == self.listing.commit):
            return
        ref.parent.mkdir(parents=True, exist_ok=True)
        part = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
        part.write_text(self.listing.commit)
        part.replace(ref)

    def _tick(self, before: int, total: int, done: int) -> None:
        self.progress(f"downloading {self.repo}", before + done, total)

    def _blob(self, name: str) -> Path | None:
        digest = self.listing.files[name].sha256
        return _folder(self.repo) / "blobs" / digest if digest else None

    def _there(self, name: str) -> int:
        """Bytes of a large file that an earlier try brought."""
        blob = self._blob(name)
        forms = (blob, blob.with_name(f"{blob.name}.incomplete")) if blob else ()
        return next((f.stat().st_size for f in forms if f.exists()), 0)

    def _large(self, name: str, tick: Callable[[int], None]) -> None:
        """Bring a large file to where huggingface_hub looks for it; small ones are left to the library."""
        from huggingface_hub import constants, hf_hub_url

        file, blob = self.listing.files[name], self._blob(name)
        if blob is None or file.size is None or file.size > LARGEST_HTTP:
            return
        blob.parent.mkdir(parents=True, exist_ok=True)
        lock = Path(constants.HF_HUB_CACHE) / ".locks" / _folder(self.repo).name / f"{blob.name}.lock"
        with locked(lock, lambda: log.warning("waiting for another process that downloads %s", name)):
            if not blob.exists():
                url = hf_hub_url(self.repo, name, revision=self.listing.commit)
                fill(url, blob.with_name(f"{blob.name}.incomplete"), file.size, blob.name, tick)
                blob.with_name(f"{blob.name}.incomplete").replace(blob)


class _InCache:
    """Gets files that are in a snapshot's folder already."""

    def __init__(self, snapshot: Path) -> None:
        self.snapshot = snapshot

    def get(self, names: list[str]) -> Path:
        if gone := [n for n in names if not (self.snapshot / n).exists()]:
            raise ModelNotFoundError(f"not all of it is there: {', '.join(gone[:3])} must be downloaded once, online")
        return self.snapshot

    def published(self, revision: str) -> None:
        """It is."""


def _bring(source: HubSource, listing: _Listing, way: _Download | _InCache) -> Path:
    """Choose the model's files and get them."""
    names = listing.files.keys()
    ggufs = choice.gguf_models(names)
    if source.want is None and choice.is_folder_model(names):
        weights = choice.safetensors(names)
        if choice.needs_index(names):
            weights = _shards(source.repo, way.get([choice.INDEX]) / choice.INDEX)
        folder = way.get([*(n for n in choice.SIDE_FILES if n in names), *weights])
        way.published(source.revision)
        return folder
    if source.want is None and not ggufs:
        others = ", ".join(sorted(names)[:10])
        raise ModelNotFoundError(
            f"{source.repo} has neither config.json with safetensors nor GGUF files, which are what Headrace reads; "
            f"it has: {others}"
        )
    if not ggufs and choice.is_folder_model(names):
        raise ModelNotFoundError(f"{source.repo} has no GGUF files; leave `:{source.want}` out to use its safetensors")
    model = choice.choose_gguf(ggufs, source.want, source.repo)
    if source.sha256 and (found := listing.files[model.name].sha256) not in (None, source.sha256):
        raise HeadraceError(f"{source.label} on the hub has SHA-256 {found}, expected {source.sha256}")
    path = way.get(list(model.files)) / model.name
    way.published(source.revision)
    return path


def _shards(repo: str, index: Path) -> list[str]:
    """The index and the weight files that it names."""
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise HeadraceError(f"{repo}: {choice.INDEX} is broken ({e}); delete {index} and try again") from e
    for name in names:
        if not choice.safe(name):
            raise HeadraceError(f"{repo}: {choice.INDEX} names {name!r}, which is no plain name; refused")
    return [choice.INDEX, *names]


def _list(source: HubSource) -> _Listing:
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(source.repo, revision=source.revision, files_metadata=True)
    except (TypeError, KeyError, JSONDecodeError) as e:
        raise HeadraceError(f"{source.repo}: the answer is no hub's ({_first_line(e)}); is HF_ENDPOINT a hub?") from e
    if info.sha is None or not _COMMIT.fullmatch(info.sha):
        raise HeadraceError(f"{source.repo}: the hub's answer names no commit; is HF_ENDPOINT a hub?")
    files = {}
    for file in info.siblings or []:
        if not choice.safe(file.rfilename):
            raise HeadraceError(f"{source.repo} lists the file {file.rfilename!r}, which is no plain name; refused")
        digest = file.lfs.sha256 if file.lfs else None
        if digest is not None and not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise HeadraceError(f"{source.repo} gives {digest!r} for the SHA-256 of {file.rfilename}; refused")
        files[file.rfilename] = _File(file.lfs.size if file.lfs else file.size, digest)
    return _Listing(info.sha, files)


def _snapshot(source: HubSource) -> Path:
    """Folder of the cached snapshot of a revision."""
    folder = _folder(source.repo)
    commit = source.revision
    if not _COMMIT.fullmatch(commit):
        try:
            commit = (folder / "refs" / commit).read_text().strip()
        except (OSError, ValueError):
            commit = ""
    if not _COMMIT.fullmatch(commit) or not (folder / "snapshots" / commit).is_dir():
        raise ModelNotFoundError(
            f"{source.label} is not in the hub's cache, {folder.parent}"
            + ("; unset HF_HUB_OFFLINE to download it" if offline() else "")
        )
    return folder / "snapshots" / commit


def _names_below(folder: Path) -> list[str]:
    """Files below a folder by relative name; a link to nothing is none."""
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def _folder(repo: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def _check_space(repo: str, cache: Path, needed: int) -> None:
    at = next(p for p in (cache, *cache.parents) if p.exists())
    free = shutil.disk_usage(at).free
    if needed > free:
        raise HeadraceError(
            f"{repo} needs {needed / 1e9:.2f} GB and {cache} has {free / 1e9:.2f} GB free; "
            "free some or set HF_HOME to a larger disk"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of huggingface_hub's own."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def _explained(source: HubSource) -> Iterator[None]:
    """Turn the library's errors into ours, each with what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
    )

    endpoint = constants.ENDPOINT
    try:
        yield
    except HfHubHTTPError as e:
        raise _explain(source, endpoint, e) from e
    except HFValidationError as e:
        raise ModelNotFoundError(f"{source.repo!r} is no name of a hub repo: {_first_line(e)}") from e
    except (HTTPError, LocalEntryNotFoundError) as e:
        raise Unreachable(f"cannot reach {endpoint} ({_first_line(e)}); check the connection, or HF_ENDPOINT") from e
    except OSError as e:
        if e.errno == errno.ENOSPC:
            raise HeadraceError(
                f"no space left in {constants.HF_HUB_CACHE} for {source.label}; free some or set HF_HOME to a larger "
                "disk: the download goes on where it stopped"
            ) from e
        raise HeadraceError(f"{source.label}: {e}") from e


def _explain(source: HubSource, endpoint: str, e: HfHubHTTPError) -> HeadraceError:
    from huggingface_hub import get_token
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    status = e.response.status_code
    login = "log in with `hf auth login` or set HF_TOKEN"
    if isinstance(e, GatedRepoError):
        return ModelNotFoundError(
            f"{source.repo} is gated: accept its terms at {endpoint}/{source.repo}, then {login} (of that account)"
        )
    if isinstance(e, RevisionNotFoundError):
        return ModelNotFoundError(f"{source.repo} has no revision {source.revision!r} on {endpoint}")
    if isinstance(e, RepositoryNotFoundError):
        what = "your token may not see it" if get_token() else login
        return ModelNotFoundError(f"no model {source.repo} on {endpoint}, or it is private: then {what}")
    if status == 401:
        return ModelNotFoundError(f"{endpoint} refuses the token (401); {login}, or unset HF_TOKEN")
    if status == 403:
        return ModelNotFoundError(f"{endpoint} forbids {source.repo} (403): {_first_line(e)}; {login} that may see it")
    if status == 404:
        return ModelNotFoundError(f"{source.label} is not on {endpoint} (404)")
    return Unreachable(f"{endpoint} answered {status} for {source.label}; try again later, or check HF_ENDPOINT")


def _first_line(e: BaseException) -> str:
    return next((line.strip() for line in str(e).splitlines() if line.strip()), type(e).__name__)
