"""One large file over HTTP, taken up where it broke off and checked. Uses huggingface_hub's session; knows no cache."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from headrace.errors import HeadraceError
from headrace.loading.files import CHUNK

log = logging.getLogger(__name__)

ATTEMPTS = 5
"""Requests without a new byte before a download is given up."""

_RETRIED = {408, 429, 500, 502, 503, 504}


class Unreachable(HeadraceError):
    """A server did not answer, or not in a useful way: what a cache holds may serve."""


class _Part:
    """A file that is being filled, and the digest of what it holds."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.digest = sha256()
        self.size = 0
        while chunk := file.read(CHUNK):
            self._count(chunk)

    def add(self, chunk: bytes) -> None:
        self.file.write(chunk)
        self._count(chunk)

    def restart(self) -> None:
        self.file.seek(0)
        self.file.truncate()
        self.digest, self.size = sha256(), 0

    def _count(self, chunk: bytes) -> None:
        self.digest.update(chunk)
        self.size += len(chunk)


def fill(url: str, path: Path, size: int, digest: str, tick: Callable[[int], None]) -> None:
    """Fill `path` up to `size` bytes, going on after what it holds, and check its SHA-256.

    A file whose content turns out wrong is removed; one that broke off stays for the next try.
    """
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of whichever HTTP library it uses

    if path.exists() and path.stat().st_size > size:
        path.unlink()
    path.touch()
    with path.open("r+b") as file:
        part, failures = _Part(file), 0
        while part.size < size:
            before, broke = part.size, None
            try:
                _receive(url, part, size, tick)
            except HTTPError as e:
                broke = e
            if part.size < size:
                failures = 0 if part.size > before else failures + 1
                _give_up(url, broke, failures)
                log.info("%s broke off at %d of %d bytes: %s", url, part.size, size, broke or "the answer was short")
                time.sleep(min(0.1 * 4**failures, 10))
        file.flush()
        os.fsync(file.fileno())
    if (found := part.digest.hexdigest()) != digest:
        path.unlink()
        raise HeadraceError(f"{url} gave a file with SHA-256 {found}, expected {digest}; it was removed, try again")


def _give_up(url: str, broke: Exception | None, failures: int) -> None:
    """Raise where another request would not help."""
    status = getattr(getattr(broke, "response", None), "status_code", None)
    if failures < ATTEMPTS and (status is None or status in _RETRIED):
        return
    raise broke or Unreachable(f"{url} ends too early, {failures} times over; try again later")


def _receive(url: str, part: _Part, size: int, tick: Callable[[int], None]) -> None:
    """One request for the rest of `part`; starts over where the server ignores the range. It may end early."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

    headers = build_hf_headers() | {"Accept-Encoding": "identity", "Range": f"bytes={part.size}-"}
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True) as response:
        hf_raise_for_status(response)
        span = response.headers.get("Content-Range", "")
        if response.status_code != 206 or not span.startswith(f"bytes {part.size}-"):
            part.restart()
        for chunk in response.iter_bytes():  # as they arrive: none is lost in a buffer when the rest does not come
            if part.size + len(chunk) > size:
                raise HeadraceError(f"{url} sends more than the {size} bytes that the hub lists; refused")
            part.add(chunk)
            tick(part.size)
