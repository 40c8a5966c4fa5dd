"""From a conversation in a body to the token ids of its prompt. The one place that knows what the template is given."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from headrace.errors import RequestError
from headrace.serve.messages import conversation
from headrace.tokenize.messages import conversation as readable
from headrace.tokenize.tokenizer import RESERVED
from headrace.tokenize.tools.choose import form_of
from headrace.tokenize.tools.form import Form
from headrace.tokenize.tools.history import fitted

if TYPE_CHECKING:
    from headrace.engine.async_llm import AsyncLLM
    from headrace.params import SamplingParams
    from headrace.tokenize.tokenizer import Tokenizer


class Conversation(Protocol):
    """What a body with a conversation has."""

    messages: Any
    parse_special: bool | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None


def check_ends(body: Conversation) -> None:
    """RequestError where the prompt is to end in two ways."""
    if body.continue_final_message and body.add_generation_prompt:
        raise RequestError(
            "add_generation_prompt and continue_final_message exclude each other: the prompt ends either where an "
            "answer begins or inside one",
            "add_generation_prompt",
        )


def fitted_messages(
    body: Conversation, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[list[dict[str, Any]], Form | None]:
    """The messages as the model's template takes them, and, where they or `tools` have to do with tool calls, in which
    form it has those; None where that is not known. RequestError names the message."""
    messages = conversation(body.messages, continues=bool(body.continue_final_message))
    if not tools and not any("tool_calls" in message or message["role"] == "tool" for message in messages):
        return messages, None
    form = form_of(tokenizer)
    if form is None:
        return messages, None
    readable(messages, parts=True)  # judged as they were sent, for what comes out may be counted otherwise
    return fitted(messages, form, tools), form


def variables(body: Conversation, tools: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """What the template is given besides messages; `tools` are those that it shows itself. RequestError names the
    field at fault."""
    continues = bool(body.continue_final_message)
    own = body.chat_template_kwargs or {}
    if taken := sorted(RESERVED & own.keys()):
        raise RequestError(f"chat_template_kwargs must not hold {taken[0]}", "chat_template_kwargs")
    return {
        "add_generation_prompt": not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        "continue_final_message": continues,
        "parse_special_in_content": bool(body.parse_special),
        **({"tools": list(tools)} if tools else {}),
        **own,
    }


async def rendered(llm: AsyncLLM, body: Conversation, params: SamplingParams) -> list[int]:
    """Token ids of a conversation in which no tools are offered. RequestError names the message or the field."""
    messages, _ = await asyncio.to_thread(fitted_messages, body, llm.tokenizer)
    return await llm.render_chat(messages, params, **variables(body))
