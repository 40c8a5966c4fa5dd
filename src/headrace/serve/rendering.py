"""From a conversation in a body to the token ids of its prompt. The one place that knows what the template is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from headrace.errors import RequestError
from headrace.serve.messages import conversation
from headrace.tokenize.tokenizer import RESERVED

if TYPE_CHECKING:
    from headrace.engine.llm import AsyncLLM
    from headrace.params import SamplingParams


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


async def rendered(llm: AsyncLLM, body: Conversation, params: SamplingParams) -> list[int]:
    """Token ids. RequestError names the message or the field at fault."""
    continues = bool(body.continue_final_message)
    messages = conversation(body.messages, continues=continues)
    variables = body.chat_template_kwargs or {}
    if taken := sorted(RESERVED & variables.keys()):
        raise RequestError(f"chat_template_kwargs must not hold {taken[0]}", "chat_template_kwargs")
    return await llm.render_chat(
        messages,
        params,
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
        parse_special_in_content=bool(body.parse_special),
        **variables,
    )
