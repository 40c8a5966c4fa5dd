"""POST /v1/chat/completions and /v1/completions: from a body to a run, from a run to an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.errors import RequestError
from headrace.params import SamplingParams
from headrace.serve.answers import ChatWriter, CompletionWriter, Head, Writer
from headrace.serve.bodies import COMPLETION_TOKENS, ChatBody, CompletionBody, chat_body, completion_body, renamed
from headrace.serve.chat import Chat
from headrace.serve.deadline import Deadline
from headrace.serve.gone import EventStream, unless_gone
from headrace.serve.problems import stopping
from headrace.serve.prompts import prompt_pieces, prompts_of
from headrace.serve.reading import read_object
from headrace.serve.running import Asked, Echo, Run, answer, events
from headrace.serve.service import Service
from headrace.serve.visits import visit_of
from headrace.serve.written import as_event, as_json

if TYPE_CHECKING:
    from headrace.engine.async_llm import AsyncLLM

MAX_ALL_CHOICES = 2048
"""Most choices of one request, prompts times n."""


class Endpoints:
    """The two generating endpoints over one service. `body_bytes` is the largest body."""

    def __init__(self, service: Service, body_bytes: int) -> None:
        self._service = service
        self._body_bytes = body_bytes

    async def chat(self, request: Request) -> Response:
        llm = self._service.model()
        body = chat_body(await read_object(request, self._body_bytes))
        deadline = Deadline(body.timeout_s)
        model = visit_of(request.scope).model = self._service.require(body.model, llm)
        try:
            asked, _held = await unless_gone(request.receive, deadline.bound(_chat(llm, body)))
            run = Run(llm, [asked], visit_of(request.scope), deadline)
        except RequestError as error:
            raise renamed(error, body.names()) from None
        head = Head(model, self._service.fingerprint(llm))
        writer = ChatWriter(head, llm.tokenizer, logprobs=asked.params.logprobs, usage_key=body.includes_usage())
        return await _respond(request, run, writer, stream=bool(body.stream), usage=body.includes_usage())

    async def completions(self, request: Request) -> Response:
        llm = self._service.model()
        body = completion_body(await read_object(request, self._body_bytes))
        deadline = Deadline(body.timeout_s)
        model = visit_of(request.scope).model = self._service.require(body.model, llm)
        asked = await unless_gone(request.receive, deadline.bound(_asked(llm, body)))
        try:
            _held = await unless_gone(request.receive, deadline.bound(llm.prepare(asked[0].params)))
            run = Run(llm, asked, visit_of(request.scope), deadline)
        except RequestError as error:
            raise renamed(error, body.names()) from None
        head = Head(model, self._service.fingerprint(llm))
        writer = CompletionWriter(head, llm.tokenizer, logprobs=body.logprobs, usage_key=body.includes_usage())
        return await _respond(request, run, writer, stream=bool(body.stream), usage=body.includes_usage())


async def _chat(llm: AsyncLLM, body: ChatBody) -> tuple[Asked, object]:
    """The chat of a body, rendered, and what must be held until it runs."""
    chat = await asyncio.to_thread(Chat, body, llm.tokenizer)  # schemas and old calls may be long
    asked = chat.asked(await llm.render_chat(chat.messages, chat.params, **chat.template()))
    try:
        return asked, await llm.prepare(asked.params)
    except RequestError:
        for at, schema in chat.schemas():
            await _judge(llm, replace(asked.params, grammar=schema), at)
        raise


async def _judge(llm: AsyncLLM, params: SamplingParams, at: str) -> None:
    """RequestError for `at` where the grammar, a tool's schema, cannot be honoured."""
    try:
        await llm.prepare(params)
    except RequestError as error:
        rest = (error.param or "").removeprefix("grammar")
        raise RequestError(f"{at}{rest}: {error}", f"{at}{rest}") from None


async def _asked(llm: AsyncLLM, body: CompletionBody) -> list[Asked]:
    """The prompts of a body as token ids, with their parameters and, where asked for, their texts."""
    prompts = prompts_of(body.prompt)
    body.judge_ids(min(len(prompts), MAX_ALL_CHOICES))
    first = body.params(room=COMPLETION_TOKENS)  # judged before any tokenizing
    if len(prompts) * (body.n or 1) > MAX_ALL_CHOICES:
        raise RequestError(
            f"{len(prompts)} prompts times n {body.n or 1} are more than the {MAX_ALL_CHOICES} choices of one request",
            "n" if len(prompts) == 1 else "prompt",
        )
    special = not body.suffix if body.parse_special is None else body.parse_special
    ids = await asyncio.gather(*(_ids(llm, p, body.suffix, first, parse_special=special) for p in prompts))
    asked = []
    for number, tokens in enumerate(ids):
        params = body.params(room=_room(llm.model.context, len(tokens), first))
        name = "prompt" if len(prompts) == 1 else f"prompt[{number}]"
        asked.append(Asked(tokens, params, name))
    if not body.echo:
        return asked
    return [await _with_echo(llm, one, prompt, body) for one, prompt in zip(asked, prompts, strict=True)]


def _room(context: int, prompt: int, params: SamplingParams) -> int:
    """What a prompt of so many tokens leaves of the context."""
    last = params.truncate_prompt_tokens or 0
    if last > 0:
        return context - min(prompt, last)
    return context - prompt if params.bounded else COMPLETION_TOKENS


async def _ids(
    llm: AsyncLLM, prompt: str | Sequence[int], suffix: str | None, params: SamplingParams, *, parse_special: bool
) -> Sequence[int]:
    if not suffix:
        return await llm.encode(prompt, params, parse_special=parse_special) if isinstance(prompt, str) else prompt
    if not isinstance(prompt, str):
        raise RequestError("suffix needs prompts that are texts, not token ids", "suffix")
    return await llm.encode_infill(prompt, suffix, params, parse_special=parse_special)


async def _with_echo(llm: AsyncLLM, one: Asked, prompt: str | Sequence[int], body: CompletionBody) -> Asked:
    typed = prompt if isinstance(prompt, str) else None
    ids = one.ids if one.params.truncate_prompt_tokens is None else llm.kept(one.ids, one.params, param=one.name)
    pieces = await asyncio.to_thread(prompt_pieces, llm.tokenizer, ids, typed)
    return Asked(ids, one.params, one.name, Echo(pieces, entries=body.logprobs is not None))


async def _respond(request: Request, run: Run, writer: Writer, *, stream: bool, usage: bool) -> Response:
    visit = visit_of(request.scope)
    visit.streamed = stream
    if stream:

        def farewell() -> bytes:
            problem = stopping()
            visit.refused(problem)
            return as_event(problem.body())

        return EventStream(events(run, writer, usage=usage), farewell=farewell, ended=run.abort)
    try:
        whole: dict[str, Any] = await unless_gone(request.receive, answer(run, writer))
    finally:
        run.abort()
    return Response(as_json(whole), media_type="application/json")
