"""`headrace list`: the models with a name, and those that are on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.console import out, size


@dataclass(frozen=True, slots=True)
class Line:
    """One model."""

    name: str
    about: str
    path: str | None
    """Where it is; None where it would be downloaded."""
    nbytes: int | None


def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array instead of a table.")] = False,
) -> None:
    """List the models of the catalogue and those in the Hugging Face hub's cache. Uses no network."""
    lines = _lines()
    if as_json:
        out(json.dumps([asdict(line) for line in lines], indent=2) + "\n")
        return
    rows = [("NAME", "SIZE", "WHAT OR WHERE")]
    rows += [(x.name, size(x.nbytes) if x.nbytes else "-", x.path or f"{x.about} (not here yet)") for x in lines]
    wide = [max(len(row[i]) for row in rows) for i in (0, 1)]
    out("".join(f"{name:<{wide[0]}}  {nbytes:>{wide[1]}}  {what}\n" for name, nbytes, what in rows))


def _lines() -> list[Line]:
    from headrace.loading import hub
    from headrace.loading.catalogue import CATALOGUE
    from headrace.loading.resolve import local

    found = [(entry, local(entry)) for entry in CATALOGUE]
    lines = [Line(e.name, e.about, str(path) if path else None, _nbytes(path)) for e, path in found]
    return lines + [Line(m.label, "in the hub's cache", str(m.path), m.nbytes) for m in hub.cached_models()]


def _nbytes(path: Path | None) -> int | None:
    """Of a GGUF file with its other parts, or of a folder's weights."""
    if path is None:
        return None
    from headrace.loading.choice import first_part

    if path.is_dir():
        return sum(p.stat().st_size for p in path.glob("*.safetensors"))
    return sum(p.stat().st_size for p in path.parent.glob("*.gguf") if first_part(p.name) == path.name)
