"""The `headrace` command: puts the commands together and turns errors into exit codes.

0 done, 1 an error, 2 wrong usage, 130 interrupted, 141 the reader of the output went away.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import typer

from headrace.cli import cache
from headrace.cli.console import fail, out
from headrace.cli.list import list_models
from headrace.cli.options import Command, engine_options, server_options
from headrace.cli.pull import pull
from headrace.cli.run import run
from headrace.cli.serve import serve
from headrace.cli.show import show
from headrace.errors import HeadraceError

app = typer.Typer(
    name="headrace",
    help="An LLM inference engine for the hardware you already have.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run", cls=Command)(engine_options(run))
app.command("serve", cls=Command)(engine_options(server_options(serve)))
app.command("pull", cls=Command)(pull)
app.command("list", cls=Command)(list_models)
app.command("show", cls=Command)(engine_options(show))
app.add_typer(cache.app, name="cache")


def _version(wanted: bool) -> None:
    if wanted:
        from headrace import __version__

        out(f"headrace {__version__}\n")
        raise typer.Exit


@app.callback()
def _headrace(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command; always ends in SystemExit."""
    _open_closed_streams()
    logging.basicConfig(level=logging.WARNING, format="headrace: %(message)s")
    if sys.stdout.encoding.lower() != "utf-8":
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        app(prog_name="headrace")
    except HeadraceError as e:
        fail(str(e))
        sys.exit(1)
    except MemoryError as e:
        fail(f"out of memory: {e or 'Python got none'}; a smaller --pool-bytes, --context or --rows needs less")
        sys.exit(1)


def _open_closed_streams() -> None:
    """Where the shell closed a standard stream (`<&-`, `>&-`), Python has None: nothing comes in, nothing goes out."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (for good)
