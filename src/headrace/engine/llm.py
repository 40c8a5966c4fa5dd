"""`LLM`: the Python API for scripts, which blocks. `engine.async_llm` is the same for event loops.

Both put a prompt into tokens, have it judged, post it to the engine and collect its deltas. Nothing else happens here.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headrace.constrain.compiler import Compiled
from headrace.engine.build import Loaded, load
from headrace.engine.collect import Collector
from headrace.engine.embedding import EmbeddingOutput, embedded, embedding_of
from headrace.engine.loop import weakly
from headrace.engine.outputs import Chunk, RequestOutput
from headrace.engine.prompts import Message, Params, Prompt, encode, is_prompt, names_of, params_of
from headrace.errors import RequestError
from headrace.loading.progress import Progress
from headrace.params import SamplingParams
from headrace.scheduler.messages import Delta
from headrace.tokenize.tokenizer import Tokenizer


class LLM:
    """A model, loaded and ready to answer.

    `model` is a path, a catalogue name or a hub name (`loading.resolve`); options are those of `config.Options`, flat:
    context, memory, kv_format, pool_bytes, budget, rows, backend, threads. Raises ModelNotFoundError, ModelFileError or
    OptionError. Methods may be called from several threads. One that nobody holds any more, nor a stream of it, ends as
    `close` does.
    """

    def __init__(self, model: str | Path, *, progress: Progress | None = None, **options: Any) -> None:
        self._sinks: dict[int, Callable[[Delta], None]] = {}
        self.model: Loaded = load(model, deliver=weakly(self._deliver), progress=progress, **options)

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
        if not isinstance(prompts, Iterable) or isinstance(prompts, Mapping):
            raise RequestError(f"prompts must be a prompt or a list of them, not {type(prompts).__name__}", "prompts")
        texts = [prompts] if is_prompt(prompts) else list(prompts)
        if not texts:
            raise RequestError("prompts must not be an empty list", "prompts")
        names = names_of(len(texts))
        encoded = [encode(self.tokenizer, p, parse_special, at) for p, at in zip(texts, names, strict=True)]  # type: ignore[arg-type]
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
        several = isinstance(messages, Sequence) and bool(messages) and not isinstance(messages[0], Mapping)
        talks: Any = messages if several else [messages]
        encoded = [self.tokenizer.chat(talk, **template) for talk in talks]
        return self._run([None] * len(encoded), encoded, params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, parse_special: bool = True) -> Stream:
        """Complete one prompt; iterate over what each step adds. Leaving or closing the iterator aborts the request."""
        ids = encode(self.tokenizer, prompt, parse_special)
        return self._start([prompt if isinstance(prompt, str) else None], [ids], params)[0]

    def stream_chat(self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any) -> Stream:
        """Answer one conversation, as `stream`; `template` as for `chat`."""
        return self._start([None], [self.tokenizer.chat(messages, **template)], params)[0]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: str | None = None,
        *,
        dimensions: int | None = None,
        normalize: bool = True,
        truncate_prompt_tokens: int | None = None,
        cache_salt: str = "",
        priority: int = 0,
        parse_special: bool = False,
    ) -> list[EmbeddingOutput]:
        """The vector of each prompt (text or token ids, one or a list): its tokens' final hidden states, pooled by
        `mean` or `last` (by default as the model's files say, else `mean`), cut to the first `dimensions` numbers and,
        with `normalize`, brought to length 1.

        All are judged before any starts: RequestError names what is wrong. HeadraceError where one has no finite
        vector.
        """
        params = embedding_of(
            self.model,
            pooling,
            dimensions,
            truncate_prompt_tokens=truncate_prompt_tokens,
            cache_salt=cache_salt,
            priority=priority,
        )
        outputs = self.generate(prompts, params, parse_special=parse_special)
        return [embedded(output, dimensions=dimensions, normalize=normalize) for output in outputs]

    def close(self) -> None:
        """Stop the engine and give its memory back. What is still running ends as aborted."""
        self.model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if "model" in vars(self):  # else it could not be loaded
            self.model.stop()  # and not wait: the collector runs anywhere, in the midst of anything

    def _run(self, texts: list[str | None], prompts: list[list[int]], params: Params) -> list[RequestOutput]:
        streams = self._start(texts, prompts, params)
        try:
            return [stream.drain() for stream in streams]
        finally:
            for stream in streams:
                stream.close()

    def _start(self, texts: list[str | None], prompts: list[list[int]], params: Params) -> list[Stream]:
        count = len(prompts)
        every = zip(prompts, params_of(params, count), names_of(count), strict=True)
        judged = [self.model.admit(ids, p, param=name) for ids, p, name in every]
        grammars = [self.model.compiled(resolved) for resolved in judged]
        prompts = [self.model.cut(ids, resolved) for ids, resolved in zip(prompts, judged, strict=True)]
        streams = []
        for text, ids, resolved, grammar in zip(texts, prompts, judged, grammars, strict=True):
            request = self.model.new_id()
            collector = Collector(f"req-{request}", text, ids, resolved, self.tokenizer)
            stream = Stream(request, collector, self, grammar)
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

    def __init__(self, request: int, collector: Collector, llm: LLM, grammar: Compiled | None) -> None:
        self.id = request
        self._grammar = grammar  # held, so that it is compiled once
        self._collector = collector
        self._llm = llm
        self._deltas: queue.SimpleQueue[Delta | None] = queue.SimpleQueue()
        self.put = self._deltas.put

    @property
    def output(self) -> RequestOutput:
        return self._collector.output

    def __next__(self) -> Chunk:
        while not self.output.finished and (delta := self._deltas.get()) is not None:
            if chunk := self._collector.add(delta):
                return chunk
        self.close()
        raise StopIteration

    def drain(self) -> RequestOutput:
        """Wait for the end."""
        for _ in self:
            pass
        return self.output

    def close(self) -> None:
        """Abort what still runs; whoever iterates gets what came until then. From any thread; safe to call again."""
        self._llm.forget(self.id)
        self._deltas.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
