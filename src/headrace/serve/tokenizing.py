"""/tokenize, /detokenize and /tokenizer_info: texts to token ids and back, in vLLM's words. No engine is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from headrace.engine.admission import LONGEST
from headrace.errors import RequestError
from headrace.params import SamplingParams
from headrace.serve.bodies import validated
from headrace.serve.fields import Refused, sift
from headrace.serve.gone import unless_gone
from headrace.serve.reading import quoted, read_object
from headrace.serve.rendering import check_ends, rendered
from headrace.serve.service import Service
from headrace.serve.tokens import token_name
from headrace.serve.written import as_json

if TYPE_CHECKING:
    from headrace.engine.async_llm import AsyncLLM

CHARS = 6
"""A token's share of the characters that decide whether a list of ids counts as a long text."""
_ANY_LENGTH = SamplingParams(overflow="truncate-middle")
"""What is only counted may be longer than the context."""


class TokenizeBody(BaseModel):
    """Of /tokenize: a raw prompt, or a conversation."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = Field(None, description="a name from /v1/models; without it the model that is served")
    prompt: str | None = Field(None, description="a text of at most 1,048,576 characters, or instead of it messages")
    messages: list[Any] | None = Field(None, description="a conversation, as in a chat")
    add_special_tokens: bool | None = Field(
        None,
        description="with prompt: what the model's file puts around a text (beginning of sequence) is put there; "
        "default true; with messages only false: the template writes all there is",
    )
    parse_special: bool | None = Field(
        None,
        description="extra; names of control tokens become control tokens; default, as where such a prompt is "
        "answered: true with prompt, false with messages",
    )
    return_token_strs: bool | None = Field(None, description="give `token_strs` too; default false")
    add_generation_prompt: bool | None = Field(
        None, description="with messages, as in a chat; default: unless continue_final_message"
    )
    continue_final_message: bool | None = Field(None, description="with messages, as in a chat; default false")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="with messages, as in a chat")


class DetokenizeBody(BaseModel):
    """Of /detokenize."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = Field(None, description="a name from /v1/models; without it the model that is served")
    tokens: list[int] = Field(description="token ids, at most 1,048,576, each below the width of the model's logits")


TOKENIZE: Mapping[str, Refused] = {
    "content": Refused("send prompt"),
    "text": Refused("send prompt"),
    "input": Refused("send prompt"),
    "tools": Refused("not supported here", ([],)),
    "chat_template": Refused("the model's own template is used"),
    "mm_processor_kwargs": Refused("there are no images"),
    "with_pieces": Refused("use return_token_strs", (False,)),
}
"""What /tokenize refuses."""
DETOKENIZE: Mapping[str, Refused] = {"prompt": Refused("send tokens")}
"""What /detokenize refuses."""
_OF_CHATS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")


class Tokenizing:
    """The endpoints over one service."""

    def __init__(self, service: Service, body_bytes: int) -> None:
        self._service = service
        self._body_bytes = body_bytes

    async def tokenize(self, request: Request) -> Response:
        llm = self._service.model()
        body = _tokenize_body(await read_object(request, self._body_bytes))
        self._service.require(body.model, llm)
        ids = await unless_gone(request.receive, _ids(llm, body))

        def written() -> bytes:
            names = [token_name(llm.tokenizer, i) for i in ids] if body.return_token_strs else None
            return as_json({"count": len(ids), "max_model_len": llm.model.context, "tokens": ids, "token_strs": names})

        answer = await unless_gone(request.receive, llm.in_pool(written, CHARS * len(ids)))
        return Response(answer, media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        llm = self._service.model()
        fields = sift(await read_object(request, self._body_bytes), DetokenizeBody.model_fields, DETOKENIZE)
        body = validated(DetokenizeBody, fields)
        self._service.require(body.model, llm)
        _judge(body.tokens, llm.model.vocab)

        def written() -> bytes:
            return as_json({"prompt": llm.tokenizer.decode(body.tokens, skip_special=False)})

        answer = await unless_gone(request.receive, llm.in_pool(written, CHARS * len(body.tokens)))
        return Response(answer, media_type="application/json")

    async def info(self, request: Request) -> Response:
        """What evaluation harnesses ask first: names of special tokens, and the chat template; null for none."""
        llm = self._service.model()
        tokenizer = llm.tokenizer
        facts = {
            "model_max_length": llm.model.context,
            "add_bos_token": tokenizer.add_bos,
            "add_eos_token": tokenizer.add_eos,
            "bos_token": _named(llm, tokenizer.bos),
            "eos_token": _named(llm, min(tokenizer.eos, default=None)),
            "pad_token": _named(llm, tokenizer.pad),
            "chat_template": tokenizer.chat_template,
        }
        return Response(as_json(facts), media_type="application/json")


def _named(llm: AsyncLLM, token: int | None) -> str | None:
    return None if token is None else token_name(llm.tokenizer, token)


def _tokenize_body(body: Mapping[str, Any]) -> TokenizeBody:
    parsed = validated(TokenizeBody, sift(body, TokenizeBody.model_fields, TOKENIZE))
    if (parsed.prompt is None) == (parsed.messages is None):
        raise RequestError("give either prompt or messages", "prompt")
    if parsed.messages is None:
        for name in _OF_CHATS:
            if getattr(parsed, name) is not None:
                raise RequestError(f"{name} needs messages", name)
    elif parsed.add_special_tokens:
        raise RequestError(
            "add_special_tokens is for prompts: of messages the template writes all", "add_special_tokens"
        )
    check_ends(parsed)
    return parsed


async def _ids(llm: AsyncLLM, body: TokenizeBody) -> list[int]:
    if body.prompt is None:
        return await rendered(llm, body, _ANY_LENGTH)
    text = body.prompt
    if len(text) > LONGEST:
        raise RequestError(f"prompt has {len(text)} characters, more than the {LONGEST} allowed", "prompt")
    special, around = body.parse_special is not False, body.add_special_tokens is not False
    return await llm.in_pool(lambda: llm.tokenizer.encode(text, parse_special=special, add_bos=around), len(text))


def _judge(tokens: Sequence[int], vocab: int) -> None:
    if len(tokens) > LONGEST:
        raise RequestError(f"tokens has {len(tokens)} ids, more than the {LONGEST} allowed", "tokens")
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab:
        at = next(i for i, token in enumerate(tokens) if not 0 <= token < vocab)
        raise RequestError(
            f"tokens[{at}] is {quoted(tokens[at])}, which is no token id: the model has 0 to {vocab - 1}",
            f"tokens[{at}]",
        )
