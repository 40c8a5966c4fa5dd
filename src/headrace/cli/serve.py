"""`headrace serve`: the HTTP server. Only the command line; the server is `headrace.serve`."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.console import bars, note
from headrace.cli.options import MODEL
from headrace.cli.plan import plan_facts, plan_lines
from headrace.serve.logs import event, logging_to
from headrace.serve.options import ServerOptions

if TYPE_CHECKING:
    from headrace.engine.build import Blueprint


def serve(
    model: MODEL,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="The name that clients ask for; default: the model's own.")
    ] = None,
    *,
    engine: dict[str, Any],
    server: ServerOptions,
) -> None:
    """Serve a model over HTTP, in the form that clients of OpenAI speak."""
    from headrace.serve.app import ending_in_time
    from headrace.serve.app import serve as run_server

    with ending_in_time(), logging_to(server), ExitStack() as drawn:
        progress = drawn.enter_context(bars())
        run_server(
            model,
            host=host,
            port=port,
            name=served_model_name,
            options=engine,
            server=server,
            progress=progress,
            planned=_log_plan if server.log_format == "json" else _tell,
            loaded=drawn.close,
        )


def _tell(plan: Blueprint) -> None:
    """The plan, on standard error, before weights are read."""
    note("".join(plan_lines(plan_facts(plan))).rstrip("\n"))


def _log_plan(plan: Blueprint) -> None:
    """The plan, as a line of a log that machines read."""
    event(logging.getLogger("headrace.server"), logging.INFO, "plan", plan_facts(plan))
