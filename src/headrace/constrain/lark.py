"""Judges Lark text that comes from outside: what reaches beyond a grammar is refused, what it counts out is bounded.

Grammars that are written inside the house do not pass here: they may hold `%json` of schemas that were judged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from headrace.constrain.patterns import WEIGHT, weight
from headrace.errors import RequestError

TOKENS = 20_000
"""Most names, strings, expressions and signs in one text."""

IN_RULES = 3
"""What is counted out in a rule, not in a terminal, weighs so much more: a step follows all ways through it at once."""

_TOKEN = re.compile(
    r"""(?P<comment>(?://|\#)[^\n]*)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?:\\.|[^/\\\n])+/[imslux]*)
    |(?P<directive>%[A-Za-z_]+)
    |(?P<special><[^<>\s]*>)
    |(?P<head>[?!]?[A-Za-z_][\w-]*(?:\.-?[0-9]+)?(?P<options>\[[^\[\]\n]*\])?[ \t]*:(?!:))
    |(?P<name>@?[A-Za-z_][\w-]*)
    |(?P<count>\{[ \t]*(?P<low>[0-9]*)[ \t]*(?:,[ \t]*(?P<high>[0-9]*)[ \t]*)?\}
       |~[ \t]*(?P<from>[0-9]+)(?:[ \t]*\.\.[ \t]*(?P<to>[0-9]+))?)
    |(?P<sign>[()\[\]|*+?\n&~=,.:>-]|->)
    |(?P<blank>[ \t\r\f]+)
    |(?P<other>.)""",
    re.VERBOSE,
)
_DIRECTIVES = {
    "%json": "give the schema alone, as a JSON schema",
    "%lark": "write its rules into this grammar",
    "%llguidance": "how a grammar is compiled is not for a request to say",
    "%regex": "write a regular expression, /.../",
    "%override": "write the rule once",
    "%declare": "write the rule out",
}
_OPTIONS = {
    "temperature": "the request has one for all of its answer",
    "max_tokens": "bound the expression instead, /.{0,100}/",
    "stop": "use suffix or lazy",
    "stop_capture": "an answer is its text",
}


@dataclass(slots=True)
class _Rule:
    """What one rule counts out by itself, and which rules it needs how often."""

    own: int = 0
    needs: list[tuple[str, int]] = field(default_factory=list)


def admit(text: str, at: str) -> None:
    """RequestError for `at` where the text may not be compiled. What is no Lark at all is left to the library."""
    rules: dict[str, _Rule] = {}
    name, body = "", _Body(1)
    for number, token in enumerate(_TOKEN.finditer(text)):
        if number > TOKENS:
            raise RequestError(f"the grammar has more than {TOKENS} words", at)
        kind, said = str(token.lastgroup), token[0]
        if kind in ("low", "high", "from", "to"):
            kind = "count"
        if token["head"] is not None:
            rules[name] = body.rule()
            name = re.split(r"[\[.:\s]", said.lstrip("?!"))[0]
            body = _Body(1 if name.lstrip("_")[:1].isupper() else IN_RULES)
            _options(token["options"] or "", at)
        elif kind == "directive":
            _directive(said, text[token.end() : token.end() + 100], at)
        else:
            body.read(kind, token)
    rules[name] = body.rule()
    if _most(rules) > WEIGHT:
        raise RequestError(f"the grammar counts out more than {WEIGHT} characters", at)


def _directive(said: str, rest: str, at: str) -> None:
    if said in _DIRECTIVES:
        raise RequestError(f"{said} is not supported in the grammar of a request: {_DIRECTIVES[said]}", at)
    if said == "%import" and not re.match(r"[ \t]*common\.[A-Z_]+", rest):
        raise RequestError("%import is supported of common names only, as in %import common.INT", at)


def _options(options: str, at: str) -> None:
    for word in re.findall(r"[A-Za-z_]+", re.sub(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])*/', "", options)):
        if word in _OPTIONS:
            raise RequestError(f"the option {word} of a rule is not supported: {_OPTIONS[word]}", at)


class _Body:
    """What stands behind one rule's colon, weighed from left to right as a regular expression is."""

    def __init__(self, factor: int) -> None:
        self._factor = factor
        self._open: list[_Rule] = [_Rule()]
        self._last = _Rule()

    def read(self, kind: str, token: re.Match[str]) -> None:
        said = token[0]
        if kind == "string":
            self._add(_Rule(len(said)))
        elif kind == "regex":
            self._add(_Rule(weight(said[1 : said.rindex("/")])))
        elif kind == "name":
            self._add(_Rule(1, [(said, 1)]))
        elif kind == "count":
            ends = (token[one] for one in ("low", "high", "from", "to"))
            times = self._factor * max([1, *(int(one[:9]) for one in ends if one)])
            self._last = _Rule(self._last.own * times, [(name, much * times) for name, much in self._last.needs])
        elif said in "([":
            self._add(_Rule())
            self._open.append(_Rule())
        elif said in ")]" and len(self._open) > 1:
            self._add(_Rule())
            self._last = self._open.pop()

    def rule(self) -> _Rule:
        while len(self._open) > 1:
            self._add(_Rule())
            self._last = self._open.pop()
        self._add(_Rule())
        return self._open[0]

    def _add(self, atom: _Rule) -> None:
        self._open[-1].own += self._last.own
        self._open[-1].needs += self._last.needs
        self._last = atom


def _most(rules: dict[str, _Rule]) -> int:
    """The heaviest rule with all that it needs; what needs itself counts once."""
    known: dict[str, int] = {}

    def of(name: str, depth: int) -> int:
        if name in known or name not in rules:
            return known.get(name, 1)
        known[name] = 1
        if depth < 200:
            rule = rules[name]
            known[name] = min(rule.own + sum(much * of(one, depth + 1) for one, much in rule.needs), 10**12)
        return known[name]

    return max((of(name, 0) for name in rules), default=0)
