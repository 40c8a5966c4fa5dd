"""`AsyncLLM`: the Python API for event loops, which the server uses too. See `engine.llm`."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from headrace.constrain.compiler import Compiled
from headrace.engine.build import Blueprint, Loaded, load
from headrace.engine.collect import Collector
from headrace.engine.embedding import EmbeddingOutput, embedded, embedding_of
from headrace.engine.loop import weakly
from headrace.engine.outputs import Chunk, RequestOutput
from headrace.engine.prompts import Message, Prompt, encode, probe, texts_of, typed
from headrace.errors import EngineDeadError, HeadraceError, UnreadError
from headrace.loading.progress import Progress
from headrace.params import SamplingParams
from headrace.scheduler.messages import Delta
from headrace.scheduler.scheduler import Stats
from headrace.tokenize.tokenizer import Tokenizer

T = TypeVar("T")

LONG_TEXT = 1 << 17
"""Characters above which a text is put into tokens apart from the others: a megabyte takes a second."""


class AsyncLLM:
    """The same for an event loop. Tokenizing and templates run in a thread pool, the engine in its own thread.

    EngineDeadError wherever it was closed before an answer could begin; OverloadedError where the queue is full
    (options `queue_requests`, `queue_tokens`). `tenant` names whose a request is: tenants get equal shares.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        progress: Progress | None = None,
        planned: Callable[[Blueprint], None] | None = None,
        **options: Any,
    ) -> None:
        """Loads the model, blocking: see `LLM`; `await AsyncLLM.load(...)` does it in a thread. `planned` is called
        once everything is sized, before weights are read."""
        self._sinks: dict[int, _Sink] = {}
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="headrace-text")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="headrace-long-text")
        self._grammars = ThreadPoolExecutor(1, thread_name_prefix="headrace-grammar")
        self._closed = False
        self.model: Loaded = load(model, deliver=weakly(self._deliver), progress=progress, planned=planned, **options)

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

    async def encode(
        self, text: str, params: SamplingParams | None = None, *, parse_special: bool = True, param: str = "prompt"
    ) -> list[int]:
        """Token ids of a raw prompt, BOS as the file says. RequestError for `param` where it is far longer than the
        context, or, where `params` allow that, than `LONGEST` characters."""
        return await self._ids(text, params, parse_special, param)

    async def encode_infill(
        self, before: str, after: str, params: SamplingParams | None = None, *, parse_special: bool = False
    ) -> list[int]:
        """Token ids of a prompt for what stands between two texts, see `Tokenizer.infill`. RequestError as `encode`."""

        def work() -> list[int]:
            for text, name in ((before, "prompt"), (after, "suffix")):
                probe(self.tokenizer, text, self.model.context, params, name)
            return self.tokenizer.infill(before, after, parse_special=parse_special)

        return await self.in_pool(work, len(before) + len(after))

    async def render_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any
    ) -> list[int]:
        """Token ids of a conversation, see `Tokenizer.chat`. RequestError where one of its texts is too long, as for
        `encode`."""
        texts = [texts_of(message) for message in messages] if isinstance(messages, Sequence) else []

        def work() -> list[int]:
            for number, text in ((n, text) for n, some in enumerate(texts) for text in some):
                probe(self.tokenizer, text, self.model.context, params, f"messages[{number}].content")
            return self.tokenizer.chat(messages, **template)

        return await self.in_pool(work, sum(len(text) for some in texts for text in some))

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, parse_special: bool = True, tenant: str = ""
    ) -> RequestOutput:
        """Complete one prompt. Cancelling the awaiting task aborts the request."""
        ids = await self._ids(prompt, params, parse_special)
        _held = await self.prepare(params)
        return await self.submit(ids, params, text=typed(prompt), tenant=tenant).drain()

    async def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, *, tenant: str = "", **template: Any
    ) -> RequestOutput:
        """Answer one conversation. Cancelling the awaiting task aborts the request."""
        ids = await self.render_chat(messages, params, **template)
        _held = await self.prepare(params)
        return await self.submit(ids, params, tenant=tenant).drain()

    async def embed(
        self,
        prompt: Prompt,
        pooling: str | None = None,
        *,
        dimensions: int | None = None,
        normalize: bool = True,
        truncate_prompt_tokens: int | None = None,
        cache_salt: str = "",
        priority: int = 0,
        parse_special: bool = False,
        tenant: str = "",
    ) -> EmbeddingOutput:
        """The vector of one prompt, as `LLM.embed`. Cancelling the awaiting task aborts the request."""
        params = embedding_of(
            self.model,
            pooling,
            dimensions,
            truncate_prompt_tokens=truncate_prompt_tokens,
            cache_salt=cache_salt,
            priority=priority,
        )
        output = await self.generate(prompt, params, parse_special=parse_special, tenant=tenant)
        return embedded(output, dimensions=dimensions, normalize=normalize)

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, parse_special: bool = True, tenant: str = ""
    ) -> RequestStream:
        """Complete one prompt; iterate over the result with `async for`."""
        ids = await self._ids(prompt, params, parse_special)
        _held = await self.prepare(params)
        return self.submit(ids, params, text=typed(prompt), tenant=tenant)

    async def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, *, tenant: str = "", **template: Any
    ) -> RequestStream:
        """Answer one conversation; iterate over the result with `async for`."""
        ids = await self.render_chat(messages, params, **template)
        _held = await self.prepare(params)
        return self.submit(ids, params, tenant=tenant)

    async def prepare(self, params: SamplingParams | None) -> Compiled | None:
        """Compile the grammar of these parameters, in a thread. Who holds what comes back can `submit` or `start` a
        request without waiting for that. RequestError where the grammar cannot be honoured."""
        if params is None or params.grammar is None:
            return None
        return await self._in(self._grammars, partial(self.model.compiled, params))

    def check(
        self, prompt: Sequence[int], params: SamplingParams | None = None, *, param: str = "prompt"
    ) -> SamplingParams:
        """Judge a request without starting it: its parameters with every default filled in, as `start` takes them, or
        RequestError, which calls the prompt `param`."""
        return self.model.admit(prompt, params or SamplingParams(), param=param)

    def reads(self, prompt: Sequence[int], judged: SamplingParams) -> int:
        """How many tokens of a prompt are computed: all, but for what a request has left out."""
        return self.model.reads(prompt, judged)

    def kept(self, prompt: Sequence[int], params: SamplingParams, *, param: str = "prompt") -> list[int]:
        """What is computed of a prompt. RequestError as `check`."""
        return self.model.cut(prompt, self.check(prompt, params, param=param))

    def ensure_room(self, requests: int, tokens: int) -> None:
        """OverloadedError where the queue has no room for so many more choices, of prompts of so many tokens."""
        self.model.ensure_room(requests, tokens)

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        text: str | None = None,
        tenant: str = "",
    ) -> RequestStream:
        """Start a request over token ids, from a running event loop. RequestError where it cannot be served."""
        judged = self.check(prompt, params)
        self.ensure_room(judged.n, self.reads(prompt, judged))
        return self.start(prompt, judged, text=text, tenant=tenant)

    def start(
        self, prompt: Sequence[int], judged: SamplingParams, *, text: str | None = None, tenant: str = ""
    ) -> RequestStream:
        """`submit` for what `check` and `ensure_room` have judged already."""
        request = self.model.new_id()
        ids = self.model.cut(prompt, judged)
        collector = Collector(f"req-{request}", text, ids, judged, self.tokenizer)
        stream = RequestStream(request, collector, self, self.model.compiled(judged))
        self._sinks[request] = _Sink(stream.loop, stream.put)
        try:
            self.model.submit(request, ids, judged, tenant)
        except EngineDeadError:
            del self._sinks[request]
            raise
        return stream

    def abort(self, request_id: str) -> None:
        """End a request early; its stream ends with finish_reason "abort". Unknown ids are ignored."""
        number = request_id.removeprefix("req-")
        if number.isdecimal():
            self.model.abort(int(number))

    def forget(self, request: int) -> None:
        """For `RequestStream`: nobody listens any more; the request is aborted where it still runs."""
        if self._sinks.pop(request, None):
            self.model.abort(request)

    def close(self) -> None:
        """Stop the engine; what still runs ends as aborted."""
        self._closed = True
        self.model.close()
        for pool in (self._pool, self._long, self._grammars):
            pool.shutdown(wait=False, cancel_futures=True)

    def __del__(self) -> None:
        if "model" in vars(self):  # else it could not be loaded
            self.model.stop()  # and not wait: the collector runs anywhere, in the midst of anything

    async def _ids(
        self, prompt: Prompt, params: SamplingParams | None, parse_special: bool, param: str = "prompt"
    ) -> list[int]:
        def work() -> list[int]:
            if isinstance(prompt, str):
                probe(self.tokenizer, prompt, self.model.context, params, param)
            return encode(self.tokenizer, prompt, parse_special, param)

        return await self.in_pool(work, len(prompt) if isinstance(prompt, str) else 0)

    async def in_pool(self, work: Callable[[], T], size: int) -> T:
        """What `work` does with the tokenizer, in a thread. `size`: characters of the text, roughly. Long texts wait
        for each other, short ones never for a long one."""
        return await self._in(self._long if size > LONG_TEXT else self._pool, work)

    async def _in(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        try:
            waiting = pool.submit(work)
        except RuntimeError as error:  # a pool takes nothing after `close`, and needs a thread at first
            if self._closed:
                raise EngineDeadError("the engine is closed") from None
            raise HeadraceError(f"the system has no thread to give for this request: {error}") from error
        try:
            return await asyncio.wrap_future(waiting)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if waiting.cancelled() and not (task and task.cancelling()):
                raise EngineDeadError("the engine is closed") from None
            raise

    def _deliver(self, deltas: list[Delta]) -> None:
        """On the engine's thread: one wake-up per event loop and step, however many requests it holds."""
        groups: dict[asyncio.AbstractEventLoop, list[tuple[_Sink, Delta]]] = {}
        for delta in deltas:
            if sink := self._sinks.get(delta.request):
                groups.setdefault(sink.loop, []).append((sink, delta))
        for loop, group in groups.items():
            try:
                loop.call_soon_threadsafe(_hand_over, group)
            except RuntimeError:  # the loop was closed: nobody can listen there any more
                for _, delta in group:
                    self.forget(delta.request)


class _Sink(NamedTuple):
    """Where the deltas of one request go. Does not keep its stream alive."""

    loop: asyncio.AbstractEventLoop
    put: Callable[[Delta], None]


def _hand_over(deltas: list[tuple[_Sink, Delta]]) -> None:
    for sink, delta in deltas:
        sink.put(delta)


class RequestStream(AsyncIterator[Chunk]):
    """Chunks of one running request; `output` is its answer so far, its prompt's logprobs included.

    Leaving it, so that nobody holds it any more, aborts the request. It belongs to the event loop that it began on.
    Where more than `most_unread` tokens wait to be read (log-probabilities count one by one) it ends with UnreadError.
    """

    def __init__(self, request: int, collector: Collector, llm: AsyncLLM, grammar: Compiled | None) -> None:
        self.id = request
        self._grammar = grammar  # held, so that it is compiled once
        self._llm = llm
        self.loop = asyncio.get_running_loop()
        self._collector = collector
        self._deltas = _Unread(request, weakref.WeakMethod(llm.forget))
        self.put = self._deltas.put

    @property
    def most_unread(self) -> int | None:
        return self._deltas.most

    @most_unread.setter
    def most_unread(self, most: int | None) -> None:
        self._deltas.most = most

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
        while not self.output.finished and (delta := await self._deltas.get()) is not None:
            if chunk := self._collector.add(delta):
                return chunk
        self.abort()
        if self._deltas.overrun:
            raise UnreadError(
                f"more than {self.most_unread} tokens waited to be read: the client must read as fast as they come"
            )
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
        """End it where it still runs; whoever iterates gets what came until then. Safe to call again."""
        self._llm.forget(self.id)
        self._deltas.end()

    def __del__(self) -> None:
        self._llm.forget(self.id)


class _Unread:
    """What a stream has not read yet, bounded where `most` is set: then it is dropped, and the request aborted. Does
    not keep the stream alive."""

    def __init__(self, request: int, forget: weakref.WeakMethod[Callable[[int], None]]) -> None:
        self.most: int | None = None
        self.overrun = False
        self._request = request
        self._forget = forget
        self._queue: asyncio.Queue[Delta | None] = asyncio.Queue()
        self._waits = 0

    def put(self, delta: Delta) -> None:
        self._waits += _weight(delta)
        self._queue.put_nowait(delta)
        if self.most is not None and self._waits > self.most:
            self.overrun = True
            while not self._queue.empty():
                self._queue.get_nowait()
            if (forget := self._forget()) is not None:
                forget(self._request)
            self.end()

    def end(self) -> None:
        """Nothing more comes."""
        self._queue.put_nowait(None)

    async def get(self) -> Delta | None:
        delta = await self._queue.get()
        self._waits -= 0 if delta is None else _weight(delta)
        return delta


def _weight(delta: Delta) -> int:
    """What it takes of memory, in tokens and log-probabilities; those of a prompt are kept anyway."""
    return len(delta.tokens) + sum(1 + len(one.top) for one in delta.logprobs)
