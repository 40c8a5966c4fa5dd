"""POST /v1/chat/completions and /v1/completions: from a body to a run, from a run to an answer."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.errors import RequestError
from headrace.params import SamplingParams
from headrace.serve.answers import ChatWriter, CompletionWriter, Head, Writer
from headrace.serve.bodies import COMPLETION_TOKENS, CompletionBody, chat_body, completion_body, renamed
from headrace.serve.gone import EventStream, unless_gone
from headrace.serve.messages import conversation
from headrace.serve.problems import stopping
from headrace.serve.prompts import prompt_pieces, prompts_of
from headrace.serve.reading import read_object
from headrace.serve.running import Asked, Echo, Run, answer, events
from headrace.serve.service import Service
from headrace.serve.written import as_event, as_json
from headrace.tokenize.tokenizer import RESERVED

if TYPE_CHECKING:
    from headrace.engine.llm import AsyncLLM

MAX_CHOICES = 2048
"""Most choices of one request, prompts times n."""


class Endpoints:
    """The two generating endpoints over one service. `body_bytes` is the largest body."""

    def __init__(self, service: Service, body_bytes: int) -> None:
        self._service = service
        self._body_bytes = body_bytes
        self._key = secrets.token_bytes(16)

    async def chat(self, request: Request) -> Response:
        llm = self._service.model()
        body = chat_body(await read_object(request, self._body_bytes))
        model = self._service.require(body.model, llm)
        continues = bool(body.continue_final_message)
        messages = conversation(body.messages, continues=continues)
        variables = body.chat_template_kwargs or {}
        if taken := sorted(RESERVED & variables.keys()):
            raise RequestError(f"chat_template_kwargs must not hold {taken[0]}", "chat_template_kwargs")
        params = body.params()
        rendering = llm.render_chat(
            messages,
            params,
            add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=continues,
            parse_special_in_content=bool(body.parse_special),
            **variables,
        )
        ids = await unless_gone(request.receive, rendering)
        try:
            _held = await unless_gone(request.receive, llm.prepare(params))
            run = Run(llm, [Asked(ids, params, "prompt")], self._tenant(request))
        except RequestError as error:
            raise renamed(error, body.names()) from None
        head = Head(model, self._service.fingerprint(llm))
        writer = ChatWriter(head, llm.tokenizer, logprobs=params.logprobs, usage_key=body.includes_usage())
        return await _respond(request, run, writer, stream=bool(body.stream), usage=body.includes_usage())

    async def completions(self, request: Request) -> Response:
        llm = self._service.model()
        body = completion_body(await read_object(request, self._body_bytes))
        model = self._service.require(body.model, llm)
        asked = await unless_gone(request.receive, _asked(llm, body))
        try:
            _held = await unless_gone(request.receive, llm.prepare(asked[0].params))
            run = Run(llm, asked, self._tenant(request))
        except RequestError as error:
            raise renamed(error, body.names()) from None
        head = Head(model, self._service.fingerprint(llm))
        writer = CompletionWriter(head, llm.tokenizer, logprobs=body.logprobs, usage_key=body.includes_usage())
        return await _respond(request, run, writer, stream=bool(body.stream), usage=body.includes_usage())

    def _tenant(self, request: Request) -> str:
        """Who asks, by the API key; everybody without one is the same. A digest that says nothing elsewhere: keys are
        neither kept nor shown."""
        given = request.headers.get("authorization")
        return hashlib.blake2b(given.encode(), digest_size=16, key=self._key).hexdigest() if given else ""


async def _asked(llm: AsyncLLM, body: CompletionBody) -> list[Asked]:
    """The prompts of a body as token ids, with their parameters and, where asked for, their texts."""
    prompts = prompts_of(body.prompt)
    first = body.params(room=COMPLETION_TOKENS)  # judged before any tokenizing
    if len(prompts) * (body.n or 1) > MAX_CHOICES:
        raise RequestError(
            f"{len(prompts)} prompts times n {body.n or 1} are more than the {MAX_CHOICES} choices of one request",
            "n" if len(prompts) == 1 else "prompt",
        )
    special = body.parse_special is not False
    ids = await asyncio.gather(*(_ids(llm, prompt, first, parse_special=special) for prompt in prompts))
    asked = []
    for number, tokens in enumerate(ids):
        params = body.params(room=llm.model.context - len(tokens) if first.bounded else COMPLETION_TOKENS)
        name = "prompt" if len(prompts) == 1 else f"prompt[{number}]"
        asked.append(Asked(tokens, params, name))
    if not body.echo:
        return asked
    return [await _with_echo(llm, one, prompt, body) for one, prompt in zip(asked, prompts, strict=True)]


async def _ids(
    llm: AsyncLLM, prompt: str | Sequence[int], params: SamplingParams, *, parse_special: bool
) -> Sequence[int]:
    return await llm.encode(prompt, params, parse_special=parse_special) if isinstance(prompt, str) else prompt


async def _with_echo(llm: AsyncLLM, one: Asked, prompt: str | Sequence[int], body: CompletionBody) -> Asked:
    typed = prompt if isinstance(prompt, str) else None
    pieces = await asyncio.to_thread(prompt_pieces, llm.tokenizer, one.ids, typed)
    return Asked(one.ids, one.params, one.name, Echo(pieces, entries=body.logprobs is not None))


async def _respond(request: Request, run: Run, writer: Writer, *, stream: bool, usage: bool) -> Response:
    if stream:
        farewell = as_event(stopping().body())
        return EventStream(events(run, writer, usage=usage), farewell=farewell, ended=run.abort)
    try:
        whole: dict[str, Any] = await unless_gone(request.receive, answer(run, writer))
    finally:
        run.abort()
    return Response(as_json(whole), media_type="application/json")
