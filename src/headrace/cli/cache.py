"""`headrace cache`: the packed weights that are kept on disk, and how to be rid of them."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.console import note, out, size
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.loading.weight_cache import Entry

JSON = Annotated[bool, typer.Option("--json", help="Print one JSON array instead of a table.")]

app = typer.Typer(no_args_is_help=False)


@app.callback(invoke_without_command=True)
def cache(context: typer.Context, as_json: JSON = False) -> None:
    """List the packed weights that are kept on disk for the next start, or clear them.

    They are made from the models' files; without them a start takes longer, and nothing else is lost.
    """
    if context.invoked_subcommand is not None:
        if as_json:
            raise typer.BadParameter("belongs behind the command", param_hint="--json")
        return
    from headrace.loading.weight_cache import entries

    _tell(entries(), as_json=as_json)


@app.command("clear")
def clear_cache(
    name: Annotated[
        str | None,
        typer.Argument(help="A model as `headrace cache` names it; default: all of them.", show_default=False),
    ] = None,
    as_json: JSON = False,
) -> None:
    """Remove packed weights from disk. Programs that are using them go on doing so."""
    from headrace.loading.weight_cache import clear, entries, weights_folder

    known = {entry.name for entry in entries()}
    if name is not None and name not in known:
        there = ", ".join(sorted(map(_shown, known))) or "none"
        raise HeadraceError(f"no packed weights of {name!r} are kept; there are: {there}")
    try:
        removed = clear(name)
    except OSError as error:
        raise HeadraceError(f"{weights_folder()} cannot be cleared: {error.strerror}") from error
    if as_json:
        _tell(removed, as_json=True)
    else:
        note(f"{len(removed)} removed, {size(sum(entry.nbytes for entry in removed))}")


def _tell(entries: list[Entry], *, as_json: bool) -> None:
    if as_json:
        out(json.dumps([_plain(entry) for entry in entries], indent=2) + "\n")
        return
    if not entries:
        note("no packed weights are kept")
        return
    rows = [("MODEL", "SIZE", "LAST USED", "MADE FROM")]
    rows += [(_shown(e.name), size(e.nbytes), _when(e.last_used), _shown(e.source) or "unknown") for e in entries]
    wide = [max(len(row[i]) for row in rows) for i in range(3)]
    out("".join(f"{a:<{wide[0]}}  {b:>{wide[1]}}  {c:<{wide[2]}}  {d}\n" for a, b, c, d in rows))


def _plain(entry: Entry) -> dict[str, Any]:
    return {
        "model": entry.name,
        "source": entry.source,
        "path": str(entry.path),
        "nbytes": entry.nbytes,
        "last_used": entry.last_used,
    }


def _shown(text: str) -> str:
    """What can be printed: names of files, and notes that somebody edited, need not be text."""
    return text.encode(errors="replace").decode()


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
