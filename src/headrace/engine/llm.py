"""`LLM` and `AsyncLLM`: the Python API. One blocking, for scripts; one for event loops, which the server uses too.

Both put a prompt into tokens, have it judged, post it to the engine and collect its deltas. Nothing else happens here.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headrace.engine.build import Loaded, load
from headrace.engine.collect import Collector
from headrace.engine.outputs import Chunk, RequestOutput
from headrace.errors import EngineDeadError, RequestError
from headrace.loading.progress import Progress
from headrace.params import SamplingParams
from headrace.scheduler.messages import Delta
from headrace.scheduler.scheduler import Stats
from headrace.tokenize.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model, loaded and ready to answer.

    `model` is a path, a catalogue name or a hub name (`loading.resolve`); options are those of `config.Options`, flat:
    context, kv_format, pool_bytes, budget, rows, backend, threads. Raises ModelNotFoundError, ModelFileError or
    OptionError. Methods may be called from several threads.
    """

    def __init__(self, model: str | Path, *, progress: Progress | None = None, **options: Any) -> None:
        self._sinks: dict[int, Callable[[Delta], None]] = {}
        self.model: Loaded = load(model, deliver=self._deliver, progress=progress, **options)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.model.checkpoint.tokenizer

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None, *, parse_special: bool = True
    ) -> list[RequestOutput]:
        """Complete each prompt (text or token ids, one or a list); outputs in the order of the prompts.

        `params` is one for all or one for each. All are judged before any starts: RequestError names what is wrong.
        `parse_special` lets the names of control tokens in text stand for the tokens.
        """
        texts = [prompts] if _is_prompt(prompts) else list(prompts)
        if not texts:
            raise RequestError("prompts must not be an empty list", "prompts")
        encoded = [_encode(self.tokenizer, p, parse_special) for p in texts]  # type: ignore[arg-type]
        return self._run([p if isinstance(p, str) else None for p in texts], encoded, params)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or each of a list, through the model's chat template.

        `template` holds what `Tokenizer.chat` takes (tools, add_generation_prompt, ...) and the template's variables.
        Contents are plain text: names of control tokens in them stay text unless parse_special_in_content is set.
        """
        several = bool(messages) and not isinstance(messages[0], Mapping)
        talks: Any = messages if several else [messages]
        encoded = [self.tokenizer.chat(talk, **template) for talk in talks]
        return self._run([None] * len(encoded), encoded, params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, parse_special: bool = True) -> Stream:
        """Complete one prompt; iterate over what each step adds. Leaving or closing the iterator aborts the request."""
        ids = _encode(self.tokenizer, prompt, parse_special)
        return self._start([prompt if isinstance(prompt, str) else None], [ids], params)[0]

    def stream_chat(self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any) -> Stream:
        """Answer one conversation, as `stream`; `template` as for `chat`."""
        return self._start([None], [self.tokenizer.chat(messages, **template)], params)[0]

    def close(self) -> None:
        """Stop the engine and give its memory back. What is still running ends as aborted."""
        self.model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _run(self, texts: list[str | None], prompts: list[list[int]], params: Params) -> list[RequestOutput]:
        streams = self._start(texts, prompts, params)
        try:
            return [stream.drain() for stream in streams]
        finally:
            for stream in streams:
                stream.close()

    def _start(self, texts: list[str | None], prompts: list[list[int]], params: Params) -> list[Stream]:
        judged = [self.model.admit(ids, p) for ids, p in zip(prompts, _each(params, len(prompts)), strict=True)]
        streams = []
        for text, ids, resolved in zip(texts, prompts, judged, strict=True):
            request = self.model.new_id()
            collector = Collector(f"req-{request}", text, ids, resolved, self.tokenizer)
            stream = Stream(request, collector, self)
            self._sinks[request] = stream.put
            streams.append(stream)
        for stream, ids, resolved in zip(streams, prompts, judged, strict=True):
            self.model.submit(stream.id, ids, resolved)
        return streams

    def _deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if sink := self._sinks.get(delta.request):
                sink(delta)

    def forget(self, request: int) -> None:
        """For `Stream`: nobody listens to this request any more; it is aborted where it still runs."""
        if self._sinks.pop(request, None):
            self.model.abort(request)


class Stream(Iterator[Chunk]):
    """Chunks of one running request; `output` is its answer so far."""

    def __init__(self, request: int, collector: Collector, llm: LLM) -> None:
        self.id = request
        self._collector = collector
        self._llm = llm
        self._deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        self.put = self._deltas.put

    @property
    def output(self) -> RequestOutput:
        return self._collector.output

    def __next__(self) -> Chunk:
        while not self.output.finished:
            if chunk := self._collector.add(self._deltas.get()):
                return chunk
        self.close()
        raise StopIteration

    def drain(self) -> RequestOutput:
        """Wait for the end."""
        for _ in self:
            pass
        return self.output

    def close(self) -> None:
        """Abort what still runs. Safe to call again."""
        self._llm.forget(self.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class AsyncLLM:
    """The same for an event loop. Tokenizing and templates run in a thread pool, the engine in its own thread."""

    def __init__(self, model: str | Path, *, progress: Progress | None = None, **options: Any) -> None:
        """Loads the model, blocking: see `LLM`; `await AsyncLLM.load(...)` does it in a thread."""
        self._streams: dict[int, RequestStream] = {}
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="headrace-text")
        self.model: Loaded = load(model, deliver=self._deliver, progress=progress, **options)

    @classmethod
    async def load(cls, model: str | Path, *, progress: Progress | None = None, **options: Any) -> AsyncLLM:
        return await asyncio.to_thread(partial(cls, model, progress=progress, **options))

    @property
    def tokenizer(self) -> Tokenizer:
        return self.model.checkpoint.tokenizer

    @property
    def dead(self) -> str | None:
        """Why the engine stopped; None while it lives."""
        return self.model.dead

    def stats(self) -> Stats:
        """Gauges and counters of the engine."""
        return self.model.stats()

    async def encode(self, text: str, *, parse_special: bool = True) -> list[int]:
        """Token ids of a raw prompt, BOS as the file says."""
        return await self._in_pool(partial(self.tokenizer.encode, text, parse_special=parse_special))

    async def render_chat(self, messages: Sequence[Message], **template: Any) -> list[int]:
        """Token ids of a conversation, see `Tokenizer.chat`."""
        return await self._in_pool(partial(self.tokenizer.chat, messages, **template))

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, parse_special: bool = True
    ) -> RequestOutput:
        """Complete one prompt. Cancelling the awaiting task aborts the request."""
        return await self.submit(await self._ids(prompt, parse_special), params, text=_text(prompt)).drain()

    async def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any
    ) -> RequestOutput:
        """Answer one conversation. Cancelling the awaiting task aborts the request."""
        return await self.submit(await self.render_chat(messages, **template), params).drain()

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, parse_special: bool = True
    ) -> RequestStream:
        """Complete one prompt; iterate over the result with `async for`."""
        return self.submit(await self._ids(prompt, parse_special), params, text=_text(prompt))

    async def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any
    ) -> RequestStream:
        """Answer one conversation; iterate over the result with `async for`."""
        return self.submit(await self.render_chat(messages, **template), params)

    def check(self, prompt: Sequence[int], params: SamplingParams | None = None) -> SamplingParams:
        """Judge a request without starting it: RequestError, or its parameters with every default filled in."""
        return self.model.admit(prompt, params or SamplingParams())

    def submit(
        self, prompt: Sequence[int], params: SamplingParams | None = None, *, text: str | None = None
    ) -> RequestStream:
        """Start a request over token ids, from a running event loop. RequestError where it cannot be served."""
        resolved = self.check(prompt, params)
        request = self.model.new_id()
        collector = Collector(f"req-{request}", text, list(prompt), resolved, self.tokenizer)
        stream = RequestStream(request, collector, self)
        self._streams[request] = stream
        try:
            self.model.submit(request, prompt, resolved)
        except EngineDeadError:
            del self._streams[request]
            raise
        return stream

    def abort(self, request_id: str) -> None:
        """End a request early; its stream ends with finish_reason "abort". Unknown ids are ignored."""
        number = request_id.removeprefix("req-")
        if number.isdigit():
            self.model.abort(int(number))

    def forget(self, request: int) -> None:
        """For `RequestStream`: nobody listens any more; the request is aborted where it still runs."""
        if self._streams.pop(request, None):
            self.model.abort(request)

    def close(self) -> None:
        """Stop the engine; what still runs ends as aborted."""
        self.model.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _ids(self, prompt: Prompt, parse_special: bool) -> list[int]:
        return await self._in_pool(partial(_encode, self.tokenizer, prompt, parse_special))

    async def _in_pool(self, work: Callable[[], list[int]]) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _deliver(self, deltas: list[Delta]) -> None:
        """On the engine's thread: one wake-up per event loop and step, however many requests it holds."""
        found = [(self._streams.get(delta.request), delta) for delta in deltas]
        live = [(stream, delta) for stream, delta in found if stream is not None]
        for loop, group in itertools.groupby(live, key=lambda pair: pair[0].loop):
            if not loop.is_closed():
                loop.call_soon_threadsafe(_hand_over, list(group))


class RequestStream(AsyncIterator[Chunk]):
    """Chunks of one running request; `output` is its answer so far, its prompt's logprobs included."""

    def __init__(self, request: int, collector: Collector, llm: AsyncLLM) -> None:
        self.id = request
        self.loop = asyncio.get_running_loop()
        self._collector = collector
        self._llm = llm
        self._deltas: asyncio.Queue[Delta] = asyncio.Queue()
        self.put = self._deltas.put_nowait

    @property
    def output(self) -> RequestOutput:
        return self._collector.output

    @property
    def request_id(self) -> str:
        return self.output.request_id

    @property
    def seed(self) -> int:
        return self.output.seed

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.output.prompt_token_ids

    async def __anext__(self) -> Chunk:
        while not self.output.finished:
            if chunk := self._collector.add(await self._deltas.get()):
                return chunk
        self.abort()
        raise StopAsyncIteration

    async def drain(self) -> RequestOutput:
        """Wait for the end; cancelled, it aborts the request."""
        try:
            async for _ in self:
                pass
        finally:
            self.abort()
        return self.output

    def abort(self) -> None:
        """End it where it still runs. Safe to call again."""
        self._llm.forget(self.id)


def _hand_over(deltas: list[tuple[RequestStream, Delta]]) -> None:
    for stream, delta in deltas:
        stream.put(delta)


def _is_prompt(prompts: object) -> bool:
    """One prompt rather than a list of them: a text, or a non-empty list of token ids."""
    return isinstance(prompts, str) or (isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int))


def _text(prompt: Prompt) -> str | None:
    return prompt if isinstance(prompt, str) else None


def _encode(tokenizer: Tokenizer, prompt: Prompt, parse_special: bool) -> list[int]:
    return tokenizer.encode(prompt, parse_special=parse_special) if isinstance(prompt, str) else list(prompt)


def _each(params: Params, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"params has {len(params)} entries for {count} prompts", "params")
    return list(params)
