"""One chat as it is asked for: what the template is given, what the answer is held to, how it is told apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headrace.errors import RequestError
from headrace.params import Grammar, Reasoning, SamplingParams
from headrace.serve.bodies import ChatBody
from headrace.serve.rendering import fitted_messages, variables
from headrace.serve.running import Asked
from headrace.serve.splitting import Split
from headrace.serve.tools import offer
from headrace.tokenize.thinking import thinking_of
from headrace.tokenize.tools.calls import Calls
from headrace.tokenize.tools.choose import marks, spelling
from headrace.tokenize.tools.reader import CallReader

if TYPE_CHECKING:
    from headrace.tokenize.tokenizer import Tokenizer

MOST_THINKING = 2**31 - 1


class Chat:
    """The body of a chat, judged with the model's template at hand. RequestError names the field at fault."""

    def __init__(self, body: ChatBody, tokenizer: Tokenizer) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self.params = body.params()
        self._offer = offer(body.tools, body.tool_choice, body.parallel_tool_calls)
        self._thinking = thinking_of(tokenizer)
        self._budget = self._judged_budget(body.thinking_token_budget)
        shown = () if self._offer is None else self._offer.shown
        self.messages, self._form = fitted_messages(body, tokenizer, shown)
        if self._offer is not None and self._form is None:
            raise RequestError(
                "this model's chat template has tool calls in a form that is not supported; tool_choice none works",
                "tools",
            )
        self._grammar: Grammar | None = None
        if self._offer is not None and self._form is not None:
            self._grammar = self._offer.grammar(self._form, spelling(self._form, tokenizer), body.form)

    def template(self) -> dict[str, Any]:
        """What the template is given besides the messages."""
        if self._offer is None or self._form is None or self._form.described is not None:
            return variables(self._body)
        return variables(self._body, self._offer.shown)

    def asked(self, prompt: Sequence[int]) -> Asked:
        """The rendered chat, to be run."""
        begun = self._thinking is not None and self._is_begun(prompt)
        params = self._held(begun)
        if self._offer is None and self._thinking is None:
            return Asked(prompt, params, "prompt")
        thinks = self._thinking is not None
        return Asked(prompt, params, "prompt", split=lambda: self._split(begun), thinks=thinks)

    def schemas(self) -> list[tuple[str, Grammar]]:
        """The tools' schemas that the answer is held to, one by one, and what errors call them."""
        return [] if self._offer is None or self._grammar is None else self._offer.schemas()

    def _judged_budget(self, budget: int | None) -> int | None:
        if budget is None:
            return None
        if self._thinking is None:
            raise RequestError(
                "thinking_token_budget is for models that think, and this one's chat template knows no thinking",
                "thinking_token_budget",
            )
        if not 0 <= budget <= MOST_THINKING:
            raise RequestError(
                f"thinking_token_budget must be from 0 to {MOST_THINKING}, not {budget}", "thinking_token_budget"
            )
        return budget

    def _is_begun(self, prompt: Sequence[int]) -> bool:
        assert self._thinking is not None
        if not self._body.continue_final_message:
            return self._thinking.is_begun(prompt, self._tokenizer)
        last = self.messages[-1]["content"]
        return isinstance(last, str) and self._thinking.is_open_in(last)

    def _held(self, begun: bool) -> SamplingParams:
        """The parameters, with what holds the answer to the offer and the thinking to its budget."""
        params = self.params
        if self._grammar is not None:
            params = replace(params, grammar=self._grammar)
        if self._thinking is not None and (params.grammar is not None or self._budget is not None):
            reasoning = Reasoning(self._thinking.begin, self._thinking.end, self._budget, begun)
            params = replace(params, reasoning=reasoning)
        return params

    def _split(self, begun: bool) -> Split:
        reader: CallReader | None = None
        known: Mapping[int, str] = {}
        if self._offer is not None and self._form is not None:
            calls = Calls(self._offer.names, self._offer.most, self._form.new_id)
            known = marks(spelling(self._form, self._tokenizer))
            reader = CallReader(
                self._form,
                calls,
                known.values(),
                held=self._grammar is not None,
                any_text=self._offer.any_text(self._body.form),
            )
        return Split(
            self._thinking,
            reader,
            known,
            begun=begun,
            shows_thinking=self._body.include_reasoning is not False,
            logprobs=self.params.logprobs is not None,
        )
