"""Command-line options made from the fields of `config.Options` and `ServerOptions`, and refused values named by their
option."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from headrace.config import Options
from headrace.errors import OptionError, RequestError
from headrace.serve.options import ServerOptions

MODEL = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A .gguf file, a folder with config.json, a name that `headrace list` shows, or org/repo or "
        "org/repo:file-or-type on the Hugging Face hub.",
        show_default=False,
    ),
]


class Command(TyperCommand):
    """Of an option that is not there it names those that begin so, before any that only look alike."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # of a class that is private to Typer or is click's, as the version will have it
            typed = getattr(error, "option_name", None)
            names = [name for option in self.params for name in (*option.opts, *option.secondary_opts)]
            if typed and (begun := [name for name in names if name.startswith(typed)]):
                error.possibilities = begun  # type: ignore[attr-defined]
            raise


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for each field of `Options`; it gets them as the flat dict `engine`."""

    def judged(values: dict[str, Any]) -> dict[str, Any]:
        Options.of(**values)
        return values

    return _with_options(command, Options, "engine", judged)


def server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for each field of `ServerOptions`; it gets them as `server`."""

    def judged(values: dict[str, Any]) -> ServerOptions:
        taken: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
        return ServerOptions(**taken)

    return _with_options(command, ServerOptions, "server", judged)


def _with_options(
    command: Callable[..., None], kind: type, into: str, judged: Callable[[dict[str, Any]], Any]
) -> Callable[..., None]:
    """Give a command one option for each field of a dataclass; it gets what `judged` makes of them as `into`."""
    added = list(_parameters(kind, into.capitalize()))
    names = [p.name for p in added]

    @wraps(command)
    def with_options(**values: Any) -> None:
        given = {name: values.pop(name) for name in names}
        with usage():
            taken = judged(given)
        command(**values, **{into: taken})

    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != into]
    own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    with_options.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    with_options.__annotations__ = {p.name: p.annotation for p in (*own, *added)}
    return with_options


def _parameters(kind: type, panel: str) -> Iterator[inspect.Parameter]:
    """One keyword parameter for each plain field, those of nested dataclasses in place."""
    types = get_type_hints(kind)
    for field in fields(kind):
        nested = types[field.name]
        if isinstance(nested, type) and is_dataclass(nested):
            yield from _parameters(nested, panel)
            continue
        assert field.default is not MISSING, f"{kind.__name__}.{field.name} needs a default"
        text, flag = field.metadata["help"], option_name(field.name)
        kind_of, default = types[field.name], field.default
        if kind_of is bool:
            flag = f"{flag}/--no-{flag.removeprefix('--')}"
        elif default == ():
            kind_of, default = list[str], []
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[
                kind_of,
                typer.Option(flag, help=f"{text[0].upper()}{text[1:]}.", rich_help_panel=panel),
            ],
        )


def option_name(field: str) -> str:
    """--kv-format for kv_format."""
    return "--" + field.replace("_", "-")


@contextmanager
def usage() -> Iterator[None]:
    """A refused value of an option is wrong usage, named by the option."""
    try:
        yield
    except OptionError as e:
        raise typer.BadParameter(str(e), param_hint=e.option and option_name(e.option)) from e
    except RequestError as e:
        raise typer.BadParameter(str(e), param_hint=e.param and option_name(e.param.partition("[")[0])) from e
