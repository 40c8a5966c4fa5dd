"""POST /v1/embeddings: its body, and its answer, field for field as OpenAI's reference has them.

https://platform.openai.com/docs/api-reference/embeddings. `pooling`, `normalize` and what else is marked so are ours.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from headrace.engine.embedding import embedding_of, finished
from headrace.errors import RequestError
from headrace.serve.bodies import validated
from headrace.serve.deadline import Deadline
from headrace.serve.fields import Refused, sift
from headrace.serve.gone import unless_gone
from headrace.serve.prompts import prompts_of
from headrace.serve.reading import read_object
from headrace.serve.running import Asked, Run
from headrace.serve.service import Service
from headrace.serve.visits import visit_of
from headrace.serve.written import as_json

if TYPE_CHECKING:
    from headrace.engine.async_llm import AsyncLLM
    from headrace.params import SamplingParams

MAX_INPUTS = 2048
"""Most inputs of one request, as OpenAI's."""


class EmbeddingBody(BaseModel):
    """The body."""

    model_config = ConfigDict(strict=True, extra="forbid")

    input: Any = Field(
        description="a string, token ids, or a list of up to 2,048 strings or lists of token ids; none empty"
    )
    model: str | None = Field(None, description="a name from /v1/models; without it the model that is served")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="`float` (default): a list of numbers; `base64`: the bytes of little-endian float32 numbers"
    )
    dimensions: int | None = Field(
        None, description="only so many of the first numbers, brought to length 1 again; from 1 to the model's width"
    )
    pooling: Literal["mean", "last"] | None = Field(
        None,
        description="extra; `mean` of the final hidden states of all tokens, or that of the `last`; default: what the "
        "model's files say, else `mean`",
    )
    normalize: bool | None = Field(None, description="extra; bring vectors to length 1; default true")
    truncate_prompt_tokens: int | None = Field(
        None, description="extra; read only so many of each input's last tokens; -1: as many as the context holds"
    )
    parse_special: bool | None = Field(
        None, description="extra; names of control tokens in texts become control tokens; default false"
    )
    cache_salt: str | None = Field(
        None, description="extra; share cached prefixes only with requests of the same salt, up to 256 characters"
    )
    priority: int | None = Field(
        None, description="extra; -100 to 100, default 0: a higher one goes before others, within bounds"
    )
    timeout_s: float | None = Field(
        None, description="extra; seconds after which the request is ended, above 0, at most 86,400; see Timeouts"
    )


REFUSED: Mapping[str, Refused] = {
    "messages": Refused("send input"),
    "prompt": Refused("send input"),
    "add_special_tokens": Refused("what the model's file puts around a text is put there", (True,)),
    "embed_dtype": Refused("vectors are float32", ("float32",)),
    "endianness": Refused("base64 is little-endian", ("native", "little")),
    "overflow": Refused("use truncate_prompt_tokens", ("error",)),
    "stream": Refused("an embedding comes in one piece", (False,)),
}
"""What /v1/embeddings refuses."""


class Embeddings:
    """The endpoint over one service."""

    def __init__(self, service: Service, body_bytes: int) -> None:
        self._service = service
        self._body_bytes = body_bytes

    async def answer(self, request: Request) -> Response:
        llm = self._service.model()
        fields = sift(await read_object(request, self._body_bytes), EmbeddingBody.model_fields, REFUSED)
        body = validated(EmbeddingBody, fields)
        deadline = Deadline(body.timeout_s)
        model = visit_of(request.scope).model = self._service.require(body.model, llm)
        asked = await unless_gone(request.receive, deadline.bound(_asked(llm, body)))
        run = Run(llm, asked, visit_of(request.scope), deadline)
        try:
            outputs = await unless_gone(request.receive, run.outputs())
        finally:
            run.abort()
        vectors = [output.embedding for output in outputs]
        prompt = run.usage().prompt
        return Response(await asyncio.to_thread(_written, body, model, vectors, prompt), media_type="application/json")


async def _asked(llm: AsyncLLM, body: EmbeddingBody) -> list[Asked]:
    params = embedding_of(
        llm.model,
        body.pooling or None,
        body.dimensions,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
    )
    inputs = prompts_of(body.input, "input")
    if len(inputs) > MAX_INPUTS:
        raise RequestError(f"input has {len(inputs)} entries, more than the {MAX_INPUTS} of one request", "input")
    alone = isinstance(body.input, str) or isinstance(body.input[0], int)
    names = ["input"] if alone else [f"input[{i}]" for i in range(len(inputs))]
    for name, one in zip(names, inputs, strict=True):
        if not one:
            raise RequestError(f"{name} must not be empty", name)
    every = zip(inputs, names, strict=True)
    ids = await asyncio.gather(*(_ids(llm, one, params, name, body) for one, name in every))
    return [Asked(tokens, params, name) for tokens, name in zip(ids, names, strict=True)]


async def _ids(
    llm: AsyncLLM, one: str | Sequence[int], params: SamplingParams, name: str, body: EmbeddingBody
) -> Sequence[int]:
    if not isinstance(one, str):
        return one
    return await llm.encode(one, params, parse_special=bool(body.parse_special), param=name)


def _written(body: EmbeddingBody, model: str, vectors: Sequence[Sequence[float]], prompt: int) -> bytes:
    data = []
    for index, vector in enumerate(vectors):
        numbers = finished(vector, dimensions=body.dimensions, normalize=body.normalize is not False)
        shown: Any = numbers.tolist()
        if body.encoding_format == "base64":
            shown = base64.b64encode(numbers.astype("<f4").tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": shown})
    usage = {"prompt_tokens": prompt, "total_tokens": prompt}
    return as_json({"object": "list", "data": data, "model": model, "usage": usage})
