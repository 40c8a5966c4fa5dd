"""A scripted stand-in for `AsyncLLM`: the test says which tokens come, everything else behaves as the contract says.

Its text logic is the slow definition (decode everything, search for the stop), so that it is an oracle as well. Its
tokenizer is bytes 0 to 255, three control tokens, and whatever pieces a test adds.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from headrace.engine.admission import Limits, admit, cut
from headrace.engine.outputs import Chunk, CompletionOutput, Logprob, RequestOutput
from headrace.errors import EngineDeadError, OverloadedError, RequestError
from headrace.params import SamplingParams
from headrace.scheduler.scheduler import Stats
from headrace.tokenize.messages import conversation

BOS, EOS, TURN = 256, 257, 258
CONTROL = {BOS: "<|bos|>", EOS: "<|end|>", TURN: "<|turn|>"}
PIECES = ["MON", "DAY", "TUE", " A", " farm", "\n2", "hello", " world", ", "]
TEMPLATE = "what the tokenizer below writes, with {{ tools }} called as <tool_call>"
VOCAB = 300
"""Width of the logits; the tokenizer knows fewer."""
CONTEXT = 512
WIDTH = 6
"""Numbers of an embedding."""


LIMITS = Limits(CONTEXT, VOCAB, 10_000)


def embedding_of(ids: Sequence[int], pooling: str) -> list[float]:
    """An invented vector, of float32 numbers."""
    rng = random.Random(f"{pooling} {ids}")
    return [struct.unpack("<f", struct.pack("<f", rng.uniform(-2, 2)))[0] for _ in range(WIDTH)]


class FakeTokenizer:
    """Longest piece first, else bytes. `add_bos` as a file would say."""

    def __init__(self, *, add_bos: bool = False) -> None:
        self.add_bos = add_bos
        self.bos: int | None = BOS
        self.eos = frozenset({EOS})
        self.forget()

    def forget(self) -> None:
        """As at the beginning."""
        self.control = dict(CONTROL)
        self._pieces = [bytes([i]) for i in range(256)]
        self._pieces += [CONTROL[i].encode() for i in sorted(CONTROL)] + [p.encode() for p in PIECES]
        self.fim: tuple[int, int, int] | None = None
        self.facts = SimpleNamespace(drops_space=False, templates={"default": TEMPLATE})
        self._added = {name: i for i, name in CONTROL.items()}
        self.opens: list[int] = []
        """What the template ends a prompt with."""

    def learn(self, template: str, *, control: Sequence[str] = (), text: Sequence[str] = ()) -> list[int]:
        """A chat template and tokens of its own; the ids of all tokens in the order of their names."""
        self.facts.templates = {"default": template}
        for name in (*control, *text):
            self._added[name] = len(self._pieces)
            if name in control:
                self.control[len(self._pieces)] = name
            self._pieces.append(name.encode())
        return [self._added[name] for name in (*control, *text)]

    def added_id(self, name: str) -> int | None:
        return self._added.get(name)

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self.control)

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    def piece(self, token: int) -> bytes:
        return self._pieces[token] if token < self.vocab_size else b""

    def is_special(self, token: int) -> bool:
        return token in self.control

    def encode(
        self, text: str, *, parse_special: bool = True, add_bos: bool = True, param: str = "prompt"
    ) -> list[int]:
        raw = text.encode()
        known = [i for i in range(256, self.vocab_size) if parse_special or i not in self.control]
        known.sort(key=lambda i: -len(self._pieces[i]))
        out = [BOS] if self.add_bos and add_bos else []
        at = 0
        while at < len(raw):
            token = next((i for i in known if raw.startswith(self._pieces[i], at)), raw[at])
            out.append(token)
            at += len(self._pieces[token])
        return out

    def infill(self, before: str, after: str, *, parse_special: bool = False) -> list[int]:
        if self.fim is None:
            raise RequestError("there are no fill-in-the-middle tokens", "suffix")
        texts = [self.encode(text, parse_special=parse_special, add_bos=False) for text in (before, after)]
        return [*([BOS] if self.add_bos else []), self.fim[0], *texts[0], self.fim[1], *texts[1], self.fim[2]]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        raw = b"".join(self.piece(i) for i in ids if not (skip_special and i in CONTROL))
        return raw.decode("utf-8", "replace")

    def chat(self, messages: Sequence[Mapping[str, str]], **template: Any) -> list[int]:
        special = template.pop("parse_special_in_content", False)
        generates = template.pop("add_generation_prompt", True)
        continues = template.pop("continue_final_message", False)
        if template.get("raise"):
            raise RequestError(f"the template says: {template['raise']}", "messages")
        out: list[int] = []
        for message in conversation(messages, parts=False):
            out += [TURN, *self.encode(message["role"] + "\n", parse_special=False)]
            out += [*self.encode(message["content"], parse_special=special), EOS]
        if continues:
            out.pop()
        return [*out, TURN, *self.opens] if generates else out


@dataclass
class Script:
    """What a choice will say: tokens, then the end token; and how fast."""

    tokens: Sequence[int]
    step_s: float = 0.0
    fails_after: int | None = None
    """That many tokens come, then the row has an error."""


@dataclass
class FakeStream:
    """`RequestStream`."""

    llm: FakeLLM
    params: SamplingParams
    output: RequestOutput
    queue: asyncio.Queue[Chunk | None] = field(default_factory=asyncio.Queue)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    aborted: bool = False
    most_unread: int | None = None

    @property
    def seed(self) -> int:
        return self.output.seed

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.output.prompt_token_ids

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> Chunk:
        if self.output.finished:
            raise StopAsyncIteration
        chunk = await self.queue.get()
        if chunk is None:
            raise StopAsyncIteration
        if chunk.finish_reason is not None:
            self.output.outputs[chunk.index].finish_reason = chunk.finish_reason
            self.output.finished = all(c.finish_reason for c in self.output.outputs)
        return chunk

    def abort(self) -> None:
        if not self.output.finished and not self.aborted:
            self.llm.aborts += 1
            self.llm.aborted_at = time.monotonic()
        self.aborted = True
        self.queue.put_nowait(None)
        for task in self.tasks:
            task.cancel()


class FakeLLM:
    """`AsyncLLM`. `script(prompt ids, choice index)` says what comes."""

    def __init__(self, script: Callable[[Sequence[int], int], Script] | None = None, *, add_bos: bool = False) -> None:
        self._add_bos = add_bos
        self.tokenizer = FakeTokenizer(add_bos=add_bos)
        self.model = SimpleNamespace(
            name="fake-model", context=CONTEXT, threads=1, vocab=VOCAB, width=WIDTH, pooling="mean"
        )
        self.closed = False
        self._ids = itertools.count()
        self.reset()
        if script is not None:
            self.script = script

    def reset(self) -> None:
        """As at the beginning."""
        self.script: Callable[[Sequence[int], int], Script]
        self.says("hello world, MONDAY")
        self.dead: str | None = None
        self.full: OverloadedError | None = None
        self.asked_room: list[tuple[int, int]] = []
        self.tenants: list[str] = []
        self.tokenizer.add_bos = self._add_bos
        self.tokenizer.forget()
        self.aborts = 0
        self.aborted_at = 0.0
        self.tokens_made = 0
        self.checked = 0
        self.submitted: list[tuple[list[int], SamplingParams]] = []
        self.streams: list[FakeStream] = []
        self.late_prompt_logprobs = False
        """Choices but the first come before the prompt's log-probabilities."""

    def says(self, text: str, **how: Any) -> None:
        """Every choice says this from now on."""
        tokens = [t for t in self.tokenizer.encode(text, parse_special=False) if t != BOS]
        self.script = lambda prompt, choice: Script(tokens, **how)

    async def encode(
        self, text: str, params: SamplingParams, *, parse_special: bool = True, param: str = "prompt"
    ) -> list[int]:
        return await asyncio.to_thread(self.tokenizer.encode, text, parse_special=parse_special)

    async def encode_infill(
        self, before: str, after: str, params: SamplingParams, *, parse_special: bool = False
    ) -> list[int]:
        return await asyncio.to_thread(self.tokenizer.infill, before, after, parse_special=parse_special)

    async def in_pool(self, work: Callable[[], Any], size: int) -> Any:
        return await asyncio.to_thread(work)

    def kept(self, prompt: Sequence[int], params: SamplingParams, *, param: str = "prompt") -> list[int]:
        return list(cut(prompt, self.check(prompt, params, param=param), LIMITS))

    async def render_chat(
        self, messages: Sequence[Mapping[str, str]], params: SamplingParams, **template: Any
    ) -> list[int]:
        return await asyncio.to_thread(lambda: self.tokenizer.chat(messages, **template))

    async def prepare(self, params: SamplingParams | None) -> None:
        """It has no grammars."""

    def check(self, prompt: Sequence[int], params: SamplingParams, *, param: str = "prompt") -> SamplingParams:
        self.checked += 1
        none = SimpleNamespace(temperature=None, top_p=None, top_k=None, min_p=None, repetition_penalty=None)
        return admit(prompt, params, limits=LIMITS, defaults=none, param=param)

    def reads(self, prompt: Sequence[int], judged: SamplingParams) -> int:
        return len(prompt)

    def ensure_room(self, requests: int, tokens: int) -> None:
        self.asked_room.append((requests, tokens))
        if self.full is not None:
            raise self.full

    def start(self, prompt: Sequence[int], resolved: SamplingParams, *, tenant: str = "") -> FakeStream:
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        self.tenants.append(tenant)
        prompt = cut(prompt, resolved, LIMITS)
        self.submitted.append((list(prompt), resolved))
        assert resolved.seed is not None
        wants = resolved.prompt_logprobs is not None
        choices = [CompletionOutput(i) for i in range(resolved.n)]
        output = RequestOutput(
            f"req-{next(self._ids)}", None, list(prompt), choices, resolved.seed, [] if wants else None
        )
        stream = FakeStream(self, resolved, output)
        stream.tasks = [asyncio.ensure_future(self._speak(stream, i)) for i in range(resolved.n)]
        self.streams.append(stream)
        return stream

    def die(self, reason: str) -> None:
        """What the real one does when a step fails unexpectedly."""
        self.dead = reason
        for stream in self.streams:
            for task in stream.tasks:
                task.cancel()
            for choice in stream.output.outputs:
                if choice.finish_reason is None:
                    stream.queue.put_nowait(
                        Chunk(stream.output.request_id, choice.index, "", finish_reason="error", error=reason)
                    )

    def close(self) -> None:
        self.closed = True

    def stats(self) -> Stats:
        """Invented numbers, but for what the fake counts."""
        return Stats(
            running=sum(not stream.output.finished for stream in self.streams),
            waiting=3,
            blocks_used=10,
            blocks_total=40,
            steps=5,
            tokens_in=sum(len(ids) for ids, _ in self.submitted),
            tokens_out=self.tokens_made,
            preemptions=2,
            aborts=self.aborts,
            blocks_idle=7,
            prefix_asked=100,
            prefix_hits=25,
            places=200,
            places_filled=150,
            tier_saves=4,
            tier_loads=3,
            waiting_tokens=99,
            begin_rate=0.0,
            begin_token_rate=0.0,
            refused=6,
        )

    async def _speak(self, stream: FakeStream, index: int) -> None:
        params, prompt = stream.params, stream.output.prompt_token_ids
        if params.pooling is not None:
            await asyncio.sleep(self.script(prompt, index).step_s)
            stream.output.embedding = tuple(embedding_of(prompt, params.pooling))
        if params.prompt_logprobs is not None:
            if index == 0:
                await asyncio.sleep(0.02)
                stream.output.prompt_logprobs = [None, *(self.position(t, params.prompt_logprobs) for t in prompt[1:])]
            elif not self.late_prompt_logprobs:
                while not stream.output.prompt_logprobs:
                    await asyncio.sleep(0.001)
        script = self.script(prompt, index)
        for step in self._steps(script, params, len(prompt)):
            await asyncio.sleep(script.step_s)
            self.tokens_made += len(step.token_ids)
            chunk = Chunk(
                stream.output.request_id,
                index,
                step.text,
                step.token_ids,
                step.pieces,
                step.logprobs,
                step.finish_reason,
                step.stop_reason,
                step.error,
            )
            stream.queue.put_nowait(chunk)

    def _steps(self, script: Script, params: SamplingParams, prompt: int) -> Iterator[Chunk]:
        """The definition of what each step may show."""
        limit = CONTEXT if params.max_tokens is None else params.max_tokens
        if not params.windowed:
            limit = min(limit, CONTEXT - prompt)
        if limit == 0:
            yield Chunk("", 0, "", finish_reason="length", logprobs=None if params.logprobs is None else [])
            return
        endless = itertools.chain(script.tokens, [EOS], itertools.cycle(b"x"))
        tokens: list[int] = []
        shown = 0
        for token in itertools.islice(endless, limit):
            if script.fails_after is not None and len(tokens) >= script.fails_after:
                yield Chunk("", 0, "", finish_reason="error", error="the logits are not finite")
                return
            before = self._whole(tokens, params)
            tokens.append(token)
            text = self._whole(tokens, params)
            finish: str | None = None
            reason: str | int | None = None
            out = text
            hits = [(text.find(s), s) for s in params.stop if s in text] if len(tokens) >= params.min_tokens else []
            if hits:
                at, reason = min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
                out = text[: at + (len(reason) if params.include_stop_str_in_output else 0)]
                finish = "stop"
            elif token == EOS and not params.ignore_eos and len(tokens) >= params.min_tokens:
                finish = "stop"
            elif token in params.stop_token_ids and len(tokens) >= params.min_tokens:
                finish, reason = "stop", token
            elif len(tokens) == limit:
                finish = "length"
            else:
                held = max((k for s in params.stop for k in range(1, len(s)) if text.endswith(s[:k])), default=0)
                out = text[: len(text) - held]
            hidden = finish == "stop" and not hits
            piece = "" if hidden else text[len(before) :]
            if hidden:
                out = before
            yield Chunk(
                "",
                0,
                out[shown:],
                (token,),
                (piece,),
                None if params.logprobs is None else [self.position(token, params.logprobs)],
                finish,
                reason,
            )
            shown = max(shown, len(out))
            if finish:
                return

    def _whole(self, tokens: Sequence[int], params: SamplingParams) -> str:
        """Decoded, without an incomplete last character."""
        raw = b"".join(
            self.tokenizer.piece(t) for t in tokens if not (params.skip_special_tokens and t in self.tokenizer.control)
        )
        for less in range(4):
            try:
                return raw[: len(raw) - less].decode()
            except UnicodeDecodeError:
                continue
        return raw.decode("utf-8", "replace")

    def position(self, token: int, top: int) -> dict[int, Logprob]:
        """Invented numbers: the token's own, then the likeliest, of which every second token is one."""
        best = [(token if token % 2 and k == 0 else (token * 7 + 11 * k + 1) % VOCAB) for k in range(top)]
        out = {token: Logprob(-0.5 if token % 2 else -9.25, 1 if token % 2 else 200)}
        for k, other in enumerate(best):
            out.setdefault(other, Logprob(-0.5 - k / 8, k + 1))
        return out
