"""Chat templates: Jinja in its sandbox, with what templates expect to find there. Knows no tokens and no tokenizer.

A template comes with the model and is not trusted. Jinja's sandbox keeps it away from Python's internals, from changing
what it is given, and from ranges of over 100,000; on top of that each loop and each call looks at the clock, so that
none runs for more than `SECONDS`, and results of `*` and `**` and the text it makes are bounded. What is not bounded: a
single filter or string method on a long text, and strings that double by `~` or `+` until the memory is full.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.errors import RequestError

SECONDS = 10.0
"""How long a template may take."""

CHARACTERS = 1 << 26
"""How much text it may make."""

_deadline: ContextVar[float] = ContextVar("deadline")


def _look_at_clock() -> None:
    if time.monotonic() > _deadline.get(float("inf")):
        raise SecurityError(f"took more than {SECONDS:g} s")


class _Additions(Extension):
    """The `generation` tag, which only marks what an assistant said, and a look at the clock in every loop."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)

    def tick(self) -> None:
        _look_at_clock()

    def watched(self, tree: nodes.Template) -> nodes.Template:
        """The same template with a look at the clock at the start of each loop's body."""
        for loop in list(tree.find_all(nodes.For)):
            call = self.call_method("tick", lineno=loop.lineno)
            loop.body.insert(0, nodes.ExprStmt(call, lineno=loop.lineno))
        return tree


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _look_at_clock()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            bounded = abs(left) <= 1_000_000 and abs(right) <= 64
        else:
            sizes = [len(x) if isinstance(x, str | list | tuple) else abs(x) for x in (left, right)]
            bounded = sizes[0] * sizes[1] <= CHARACTERS or not any(
                isinstance(x, str | list | tuple) for x in (left, right)
            )
        if not bounded:
            raise SecurityError(f"the result of {operator} would be too large")
        return super().call_binop(context, operator, left, right)


def _refuse(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Not Jinja's own, which escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Additions, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment


_ENVIRONMENT = _environment()


class ChatTemplate:
    """One template, compiled once; safe to be used by several threads."""

    def __init__(self, source: str) -> None:
        self.source = source

    @cached_property
    def _tree(self) -> nodes.Template:
        try:
            return _ENVIRONMENT.parse(self.source)
        except (TemplateError, RecursionError) as error:
            raise _refused(error) from None

    @cached_property
    def _compiled(self) -> Any:
        additions = _ENVIRONMENT.extensions[_Additions.identifier]
        assert isinstance(additions, _Additions)
        try:
            code = _ENVIRONMENT.compile(additions.watched(_ENVIRONMENT.parse(self.source)))
            return _ENVIRONMENT.template_class.from_code(_ENVIRONMENT, code, _ENVIRONMENT.make_globals(None))
        except (TemplateError, RecursionError, SyntaxError, ValueError, MemoryError) as error:
            raise _refused(error) from None

    @cached_property
    def takes_parts(self) -> bool:
        """Does it go through a message's content, so that it can be a list of parts?"""
        return any(_is_content(loop.iter) for loop in self._tree.find_all(nodes.For))

    @cached_property
    def variables(self) -> frozenset[str]:
        """Every name that it uses."""
        return frozenset(node.name for node in self._tree.find_all(nodes.Name))

    @cached_property
    def literals(self) -> tuple[str, ...]:
        """Every piece of text that the template itself can put into a prompt, or look for."""
        texts = {node.data for node in self._tree.find_all(nodes.TemplateData)}
        texts |= {node.value for node in self._tree.find_all(nodes.Const) if isinstance(node.value, str)}
        return tuple(sorted(texts))

    def render(self, variables: Mapping[str, Any]) -> str:
        """The prompt. RequestError for "messages", with the template's own words, where it refuses or fails."""
        pieces: list[str] = []
        left = CHARACTERS
        token = _deadline.set(time.monotonic() + SECONDS)
        try:
            for piece in self._compiled.generate(**variables):
                left -= len(piece)
                if left < 0:
                    raise SecurityError(f"made more than {CHARACTERS:,} characters")
                pieces.append(piece)
        except RequestError:
            raise
        except Exception as error:  # whatever an expression in the template can raise
            raise _refused(error) from None
        finally:
            _deadline.reset(token)
        return "".join(pieces)


@lru_cache(maxsize=64)
def chat_template(source: str) -> ChatTemplate:
    """The template of this source, the same one each time."""
    return ChatTemplate(source)


def _refused(error: BaseException) -> RequestError:
    text = str(error) or type(error).__name__
    return RequestError(f"the model's chat template does not take these messages: {text}", "messages")


def _is_content(node: nodes.Node) -> bool:
    match node:
        case nodes.Name():
            return node.name == "content"
        case nodes.Getattr():
            return node.attr == "content"
        case nodes.Getitem():
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return False
