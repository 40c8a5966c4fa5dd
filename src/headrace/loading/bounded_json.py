"""JSON out of files that may be broken or hostile, within a budget. Knows nothing of what the JSON means."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import ModelFileError
from headrace.loading.mapped import Budget, map_file


def read_json_object(path: Path, budget: Budget) -> dict[str, Any]:
    """A file that is one JSON object. ModelFileError where it is not, or names a key twice."""
    data = map_file(path)
    budget.allow(len(data))
    return parse_json_object(path, "the file", memoryview(data), budget)


def parse_json_object(path: Path, what: str, text: memoryview, budget: Budget) -> dict[str, Any]:
    """`text` as one JSON object; `what` says in errors what part of the file it is."""
    ascii_only = len(text) == 0 or int(np.frombuffer(text, np.uint8).max()) < 128
    budget.spend(path, what, memory=(2 if ascii_only else 5) * len(text), work=len(text) // 50)
    try:
        decoded = str(text, "utf-8")
    except UnicodeDecodeError as error:
        raise ModelFileError(path, f"{what} is not UTF-8 at its byte {error.start:,}") from None
    objects, keys = decoded.count("{"), decoded.count(":")
    values = decoded.count("[") + decoded.count(",")
    budget.spend(path, what, memory=objects * 256 + keys * 128 + values * 96, work=objects * 10 + keys * 5 + values)
    try:
        found = json.loads(decoded, object_pairs_hook=_unique)
    except RecursionError:
        raise ModelFileError(path, f"{what} is JSON nested too deep") from None
    except ValueError as error:
        raise ModelFileError(path, f"{what} is not good JSON: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise ModelFileError(path, f"{what} must be a JSON object, not {type(found).__name__}")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return found
