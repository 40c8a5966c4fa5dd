"""Finds the part of a schema at fault where the library refuses the whole: the smallest that it refuses alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from headrace.constrain import shapes
from headrace.constrain.schema import Judged

TRIES = 200
"""Most parts that are tried."""
SECONDS = 1.0
"""Longest time for it."""


def path_at_fault(judged: Judged, at: str, why: str, refusal: Callable[[dict[str, Any]], str | None]) -> str:
    """`refusal` is what the library says of a schema, None where it takes it; `why` is that of the whole. Parts refused
    for the same reason come before others; `at` where none is."""
    until, other = time.monotonic() + SECONDS, None
    defined: dict[str, Any] = {key: judged.schema[key] for key in ("$defs", "definitions") if key in judged.schema}
    for way, part in sorted(_within((), judged.schema), key=lambda found: -len(found[0]))[:TRIES]:
        if way not in judged.paths or time.monotonic() > until:
            continue
        said = refusal({**defined, **part})
        if said == why:
            return judged.paths[way]
        if said is not None and other is None:
            other = judged.paths[way]
    return other or at


def _within(way: tuple[str, ...], schema: dict[str, Any]) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    """All schemas inside that are objects, each with its way there."""
    found = []
    for step, one in shapes.parts(schema):
        if isinstance(one, dict):
            found += [((*way, *step), one), *_within((*way, *step), one)]
    return found
