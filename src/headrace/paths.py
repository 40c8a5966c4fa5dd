"""Where Headrace keeps files between runs. Knows places, never what is in them."""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path:
    """Headrace's own cache folder: HEADRACE_CACHE, else headrace under XDG_CACHE_HOME, else ~/.cache/headrace.

    It may not exist yet.
    """
    if own := os.environ.get("HEADRACE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "headrace"
