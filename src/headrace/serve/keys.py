"""The API keys that count just now, read again where their file has changed. Knows no HTTP.

Whose a given key is is found by comparing it with all, in constant time.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from headrace.errors import OptionError
from headrace.serve.key_file import FILE_BYTES, Key, KeyFileError, digest_of, parsed

_log = logging.getLogger(__name__)

LOOK_S = 1.0
"""The file is looked at no more often."""
FRESH_S = 2.0
"""A file changed so recently when it was read may change again without a sign: it is read once more."""
OWN_NAME = "default"
"""The name of the key that the option `api_key` gives."""
_PLAIN = re.compile(rb"^\s*key\s*=", re.MULTILINE)


class Keys:
    """The keys that count: one of the command line, those of a file, or none, and then everybody may ask.

    OptionError where the file cannot be used at the start. Later a broken file is told in the log once, and the keys
    stay as they were.
    """

    def __init__(self, key: str | None, file: Path | None) -> None:
        self._own = () if key is None else (Key(OWN_NAME, digest_of(key)),)
        self._file = file
        self._keys: Sequence[Key] = self._own
        self._seen: tuple[object, ...] = ()
        self._fresh = False
        self._looked = 0.0
        self._complaint = ""
        """What was wrong with the file when it was last read."""
        if file is not None:
            try:
                self._read(file)
            except (OSError, KeyFileError) as error:
                raise OptionError(f"api_key_file cannot be used: {_told(error, file)}", "api_key_file") from None
            self._looked = time.monotonic()

    @property
    def required(self) -> bool:
        """Whether a request needs a key."""
        return self._file is not None or bool(self._own)

    def find(self, given: str) -> Key | None:
        """Whose key this is. Takes as long whichever it is, and where it is none."""
        self._look()
        digest = digest_of(given)
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def _look(self) -> None:
        """Read the file again where it has changed."""
        now = time.monotonic()
        if self._file is None or now - self._looked < LOOK_S:
            return
        self._looked = now
        try:
            if _signature(os.stat(self._file)) == self._seen and not self._fresh:
                return
            self._read(self._file)
            self._complaint = ""
        except (OSError, KeyFileError) as error:
            if (told := _told(error, self._file)) != self._complaint:
                self._complaint = told
                _log.error("the API keys stay as they were: %s", told)

    def _read(self, file: Path) -> None:
        """Take over the file's keys. A broken one is not read again before it changes."""
        before = self._seen
        with open(file, "rb", opener=_without_waiting) as opened:
            about = os.fstat(opened.fileno())
            if not stat.S_ISREG(about.st_mode):  # a pipe could be read once only, and waits for who writes into it
                raise KeyFileError(f"{file}: is no regular file")
            self._seen = _signature(about)
            self._fresh = time.time() - about.st_mtime < FRESH_S
            raw = opened.read(FILE_BYTES + 1)
        keys = parsed(raw, file)
        if any(key.name == OWN_NAME for key in keys) and self._own:
            raise KeyFileError(f"{file}: keys.{OWN_NAME} is the name of the key of --api-key: choose another")
        if about.st_mode & stat.S_IROTH and _PLAIN.search(raw) and not before:
            _log.warning("%s can be read by everybody on this machine (chmod 600 %s)", file, file)
        self._keys = (*self._own, *keys)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _signature(about: os.stat_result) -> tuple[object, ...]:
    return about.st_mtime_ns, about.st_size, about.st_ino


def _told(error: OSError | KeyFileError, file: Path) -> str:
    return f"{file}: {error.strerror}" if isinstance(error, OSError) else str(error)
