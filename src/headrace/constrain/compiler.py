"""Compiles grammars for one model, each once, and makes the constraint of each answer."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from headrace.constrain.constraint import Constraint, ConstraintError
from headrace.constrain.thinking import Thinking
from headrace.errors import RequestError
from headrace.params import Grammar, SamplingParams

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from headrace.constrain.guided import Guided, Vocabulary

KEPT = 64
"""So many grammars are kept compiled though nobody uses them."""


class Compiled:
    """A grammar, compiled. Whoever will need it soon holds it."""

    def __init__(self, guided: Guided) -> None:
        self._guided = guided

    def constraint(self) -> Guided:
        """For one more answer."""
        return self._guided.copy()


class Compiler:
    """Safe for several threads. `width` is that of the logits; the library is imported with the first grammar."""

    def __init__(self, vocabulary: Vocabulary, width: int, eos: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._width = width
        self._eos = eos
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._known: weakref.WeakValueDictionary[Grammar, Compiled] = weakref.WeakValueDictionary()
        self._kept: OrderedDict[Grammar, Compiled] = OrderedDict()

    def compiled(self, grammar: Grammar) -> Compiled:
        """May take a second where nobody holds it. RequestError for "grammar" where it cannot be honoured; where a
        part of a schema is at fault, for that part: "grammar.properties.age"."""
        found = self._known.get(grammar)
        if found is None:
            found = Compiled(self._compile(grammar))
        with self._lock:
            self._known[grammar] = self._kept[grammar] = found
            self._kept.move_to_end(grammar)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return found

    def constraint(self, params: SamplingParams) -> Constraint | None:
        """What one answer must be; None where it may be anything."""
        grammar = None if params.grammar is None else self.compiled(params.grammar).constraint()
        return grammar if params.reasoning is None else Thinking(params.reasoning, grammar)

    def _compile(self, grammar: Grammar) -> Guided:
        from headrace.constrain.guided import PLACE, Guided
        from headrace.constrain.sources import library_form

        source = library_form(grammar)
        try:
            return Guided.of(self._tokens(), source)
        except ConstraintError as error:
            at = self._at_fault(grammar, str(error)) if grammar.kind == "json" else "grammar"
            why = str(error) if grammar.kind == "lark" else PLACE.sub("", str(error))  # places in no text of the client
            raise RequestError(f"the {grammar.kind} grammar cannot be honoured: {why}", at) from None

    def _at_fault(self, grammar: Grammar, why: str) -> str:
        from headrace.constrain.blame import path_at_fault
        from headrace.constrain.guided import Guided
        from headrace.constrain.schema import judgement
        from headrace.constrain.sources import parsed, schema_form

        def refusal(schema: dict[str, Any]) -> str | None:
            try:
                Guided.of(self._tokens(), schema_form(schema))
            except ConstraintError as error:
                return str(error)
            return None

        return path_at_fault(judgement(parsed(grammar.source)), "grammar", why, refusal)

    def _tokens(self) -> LLTokenizer:
        from headrace.constrain.guided import library_tokenizer

        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = library_tokenizer(self._vocabulary, self._width, self._eos)
            return self._tokenizer
