"""One HTTP request while it runs: its prompts' streams in the engine, merged into parts of choices.

Owns the streams: whoever starts a run must `abort` it in the end, whatever happens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from headrace.engine.outputs import Chunk, RequestOutput
from headrace.params import SamplingParams
from headrace.serve.answers import Usage, Writer
from headrace.serve.choices import Entry, Part, Shown, joined
from headrace.serve.deadline import Deadline
from headrace.serve.problems import failed, problem_of, timed_out, unavailable
from headrace.serve.splitting import Split
from headrace.serve.visits import Visit
from headrace.serve.written import DONE, as_event

if TYPE_CHECKING:
    from headrace.engine.async_llm import AsyncLLM, RequestStream

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that stands before each of its answers."""

    pieces: tuple[str, ...]
    """For each token of the prompt its text; joined they are what is shown."""
    entries: bool
    """Whether its log-probabilities are shown too."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt of the HTTP request."""

    ids: Sequence[int]
    params: SamplingParams
    name: str
    """What errors call it: "prompt", "prompt[2]"."""
    echo: Echo | None = None
    split: Callable[[], Split] | None = None
    """Makes what tells thinking, content and tool calls of a choice apart; None: all is content."""
    thinks: bool = False
    """Does the usage tell of thinking?"""


class Run:
    """All prompts of one HTTP request. Choices are numbered prompt by prompt, as OpenAI does."""

    def __init__(self, llm: AsyncLLM, asked: Sequence[Asked], visit: Visit, deadline: Deadline) -> None:
        """Judges every prompt, then starts all. RequestError, OverloadedError, EngineDeadError, and Problem 429 where
        the API key has not so many tokens left, before anything runs. What still runs at the deadline is ended."""
        self._llm = llm
        self.visit = visit
        self._asked = asked
        self._completion = self._cached = self._thought = 0
        self._streams: list[RequestStream] = []
        self._expired = False
        self._unwatch: Callable[[], None] = lambda: None
        judged = [llm.check(one.ids, one.params, param=one.name) for one in asked]
        reads = sum(llm.reads(one.ids, params) for one, params in zip(asked, judged, strict=True))
        llm.ensure_room(sum(params.n for params in judged), reads)
        visit.charge(reads + sum(params.n * (params.max_tokens or 0) for params in judged))
        try:
            for one, params in zip(asked, judged, strict=True):
                self._streams.append(stream := llm.start(one.ids, params, tenant=visit.tenant))
                ids = stream.prompt_token_ids
                text = partial(llm.tokenizer.decode, ids, skip_special=False)
                visit.started(stream.output.request_id, len(ids), params.n, text)
        except BaseException:
            self.abort()
            raise
        self._unwatch = deadline.then(self._expire)

    def abort(self) -> None:
        """End what still runs. Safe to call again."""
        self._unwatch()
        for stream in self._streams:
            stream.abort()

    def _expire(self) -> None:
        self._expired = True
        for stream in self._streams:
            stream.abort()

    def bound_unread(self) -> None:
        """A client reads it piece by piece: what it leaves unread is bounded from now on."""
        for stream in self._streams:
            stream.most_unread = self.visit.visits.unread_tokens

    def usage(self) -> Usage:
        """So far; a prompt counts once, without what overflow left out; the tokens of all choices are summed up."""
        prompt = sum(len(stream.prompt_token_ids) for stream in self._streams)
        thought = self._thought if any(one.thinks for one in self._asked) else None
        return Usage(prompt, self._completion, self._cached, thought)

    async def parts(self) -> AsyncGenerator[Part, None]:
        """Additions to choices, as the engine's steps bring them. Problem where a choice cannot be finished."""
        waiting: list[list[Chunk]] = [[] for _ in self._asked]
        shown: dict[int, Shown] = {}
        async with aclosing(_merged(self._streams)) as chunks:
            async for prompt, chunk in chunks:
                self.visit.heard(prompt * self._asked[prompt].params.n + chunk.index, chunk)
                self._check(chunk)
                self._completion += len(chunk.token_ids)
                if chunk.timings is not None and chunk.index == 0:  # its siblings share the prompt with it anyway
                    self._cached += chunk.timings.cached
                    self.visit.cached_tokens = self._cached
                waiting[prompt].append(chunk)
                if not self._prompt_is_known(prompt):
                    continue
                for ready in waiting[prompt]:
                    part = self._part(prompt, ready, shown)
                    if part is not None:
                        self._thought += part.thought
                        if part.shows:
                            yield part
                waiting[prompt] = []
        self._check_time()
        if any(waiting):
            raise failed("the engine left out log-probabilities of the prompt")

    async def outputs(self) -> list[RequestOutput]:
        """What came of each prompt, at its end. Problem where one cannot be finished."""
        async with aclosing(_merged(self._streams)) as chunks:
            async for prompt, chunk in chunks:
                self.visit.heard(prompt * self._asked[prompt].params.n + chunk.index, chunk)
                self._check(chunk)
        self._check_time()
        return [stream.output for stream in self._streams]

    def _check_time(self) -> None:
        if self._expired and not all(stream.output.finished for stream in self._streams):
            raise timed_out()

    def _check(self, chunk: Chunk) -> None:
        if chunk.finish_reason not in ("error", "abort"):
            return
        if self._llm.dead is not None:
            raise unavailable(f"the engine has stopped: {self._llm.dead}", "engine_dead", retry=False)
        if chunk.finish_reason == "abort":
            raise unavailable("the request was ended by the server", "aborted", retry=True)
        _log.warning("%s could not be finished: %s", chunk.request_id, chunk.error)
        raise failed(f"the request could not be finished: {chunk.error}")

    def _prompt_is_known(self, prompt: int) -> bool:
        """Whether the prompt's own log-probabilities, where they are to be shown, are all there: they come before the
        first choice's tokens, but another choice may overtake it."""
        echo = self._asked[prompt].echo
        if echo is None or not echo.entries:
            return True
        return len(self._streams[prompt].output.prompt_logprobs or ()) >= len(echo.pieces)

    def _part(self, prompt: int, chunk: Chunk, shown: dict[int, Shown]) -> Part | None:
        stream, asked = self._streams[prompt], self._asked[prompt]
        index = prompt * asked.params.n + chunk.index
        if index in shown:
            return shown[index].add(chunk)
        shown[index] = Shown(index, stream.seed, asked.split and asked.split())
        if asked.echo is None:
            return shown[index].add(chunk)
        return shown[index].add(chunk, "".join(asked.echo.pieces), _echoed(stream.output, asked.echo))


def _echoed(output: RequestOutput, echo: Echo) -> tuple[Entry, ...]:
    if not echo.entries:
        return ()
    return tuple(map(Entry, output.prompt_token_ids, echo.pieces, output.prompt_logprobs or ()))


async def _merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Chunks of all streams as they come, each with its stream's number. No more wait here than there are streams, and
    one in the hand of each stream's pump; the rest stays in the streams."""
    if len(streams) == 1:
        async for chunk in streams[0]:
            yield 0, chunk
        return
    queue: asyncio.Queue[tuple[int, Chunk | Exception | None]] = asyncio.Queue(len(streams))

    async def pump(number: int) -> None:
        try:
            async for chunk in streams[number]:
                await queue.put((number, chunk))
        except Exception as error:
            await queue.put((number, error))
        else:
            await queue.put((number, None))

    pumps = [asyncio.ensure_future(pump(number)) for number in range(len(streams))]
    try:
        running = len(streams)
        while running:
            number, one = await queue.get()
            if isinstance(one, Exception):
                raise one
            if one is None:
                running -= 1
            else:
                yield number, one
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def answer(run: Run, writer: Writer) -> dict[str, object]:
    """The whole answer. Problem where a choice cannot be finished."""
    parts: dict[int, list[Part]] = {}
    async with aclosing(run.parts()) as every:
        async for part in every:
            parts.setdefault(part.index, []).append(part)
    return writer.whole([joined(parts[index]) for index in sorted(parts)], run.usage())


async def events(run: Run, writer: Writer, *, usage: bool) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events; with `usage` one more before the end. A failure is the last event."""
    run.bound_unread()
    try:
        async with aclosing(run.parts()) as every:
            async for part in every:
                for chunk in writer.chunks(part):
                    yield as_event(chunk)
        if usage:
            yield as_event(writer.last(run.usage()))
        yield DONE
    except Exception as error:
        problem = problem_of(error)
        run.visit.refused(problem)
        if problem.status == 500 and problem is not error:
            _log.error("a stream failed", exc_info=error)
        yield as_event(problem.body())
