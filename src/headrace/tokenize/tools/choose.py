"""Which form of tool calls a model has: read off the template's text and the tokenizer's tokens."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.tokenize.template import chat_template
from headrace.tokenize.thinking import Tokens
from headrace.tokenize.tools.form import Form, Spelling
from headrace.tokenize.tools.gemma import DESCRIBED_GEMMA, FUNCTION_GEMMA, GEMMA_4
from headrace.tokenize.tools.hermes import DESCRIBED_HERMES, HERMES
from headrace.tokenize.tools.llama import LLAMA
from headrace.tokenize.tools.mistral import ARGS, MISTRAL_LIST, MISTRAL_NAMED


def form_of(tokens: Tokens) -> Form | None:
    """How this model calls tools. None where its template knows tools, but in a form that is not known here."""
    templates = tokens.facts.templates
    default = templates.get("default", "")
    source = templates.get("tool_use") or default
    if "tools" not in chat_template(source).variables:
        return DESCRIBED_GEMMA if "<start_of_turn>" in source else DESCRIBED_HERMES
    if "[TOOL_CALLS]" in source:
        return MISTRAL_NAMED if ARGS in source else MISTRAL_LIST
    if "<tool_call>" in source:
        return None if "<function=" in source or "<arg_key>" in source else HERMES
    for form in (FUNCTION_GEMMA, GEMMA_4):
        if form.begins <= {tag for tag in form.begins if tag in source}:
            return form
    if "<|start_header_id|>" in source and '"parameters"' in source:
        return LLAMA
    return None


def spelling(form: Form, tokens: Tokens) -> Spelling:
    """Which of the form's tags are control tokens of this tokenizer."""
    ids = {tag: tokens.added_id(tag) for tag in form.tags}
    return Spelling({tag: i for tag, i in ids.items() if i is not None and i in tokens.special_ids})


def marks(spelling: Spelling) -> Mapping[int, str]:
    """Control tokens that are tags, by id."""
    return {i: tag for tag, i in spelling.ids.items()}
