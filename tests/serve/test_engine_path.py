"""The way of a request through the real engine (scheduler, detokenizer, collector, event loop), its tokens scripted:
the server's answers are those over `FakeLLM`, whose text logic is the slow definition."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.cache.blocks import Blocks
from headrace.engine import async_llm
from headrace.engine.admission import Limits
from headrace.engine.build import Loaded
from headrace.engine.gate import Gate
from headrace.engine.loop import Engine
from headrace.execute.plan import Admission, Executor, Masks, Plan, Result, Row, RowResult, TokenLogprob, Want
from headrace.scheduler.scheduler import Scheduler
from headrace.tokenize.stream import TextStream
from tests.serve.fake_llm import CONTEXT, EOS, VOCAB, FakeLLM, FakeTokenizer
from tests.serve.http_api import Api
from tests.serve.live_server import LiveServer


class Scripted:
    """An executor whose sampler reads from `fake.script`, and its log-probabilities from `fake.position`."""

    def __init__(self, fake: FakeLLM) -> None:
        self.fake = fake
        self.admitted: dict[int, Admission] = {}

    def run(self, plan: Plan, masks: Masks | None = None) -> Result:
        for request in plan.released:
            del self.admitted[request]
        self.admitted |= {a.request: a for a in plan.admitted}
        return Result(tuple(self._row(self.admitted[row.request], row) for row in plan.rows))

    def close(self) -> None:
        pass

    def _row(self, a: Admission, row: Row) -> RowResult:
        prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        if row.want & Want.PROMPT:
            top = a.params.prompt_logprobs or 0
            prompt_logprobs = tuple(self._score(t, top) if i else None for i, t in enumerate(row.tokens, row.start))
        if not row.want & Want.TOKEN:
            return RowResult(prompt_logprobs=prompt_logprobs)
        script = self.fake.script(a.tokens[: a.prompt], a.choice)
        at = row.start + len(row.tokens) - a.prompt
        if script.fails_after is not None and at >= script.fails_after:
            return RowResult(error="the logits are not finite")
        token = [*script.tokens, EOS][at] if at <= len(script.tokens) else ord("x")
        logprobs = () if a.params.logprobs is None else (self._score(token, a.params.logprobs),)
        return RowResult((token,), logprobs, prompt_logprobs)

    def _score(self, token: int, top: int) -> TokenLogprob:
        (own, entry), *others = self.fake.position(token, top).items()
        ranked = [*others, (own, entry)] if entry.rank == 1 and top else others
        pairs = sorted(((t, e.logprob) for t, e in ranked), key=lambda pair: -pair[1])
        return TokenLogprob(token, entry.logprob, entry.rank or 1, tuple(pairs[:top]))


def loaded(
    fake: FakeLLM,
    deliver: Any,
    *,
    executor: Executor | None = None,
    gate: Gate | None = None,
    rows: int = 3,
    budget: int = 7,
) -> Loaded:
    """What `engine.build.load` gives, around the script. Small blocks, budget and pool: much is cut and preempted."""
    tokenizer = fake.tokenizer
    blocks = Blocks(40, [None])
    scheduler = Scheduler(
        blocks,
        budget=budget,
        rows=rows,
        context=CONTEXT,
        eos=frozenset({EOS}),
        text=lambda params: TextStream(
            tokenizer,  # type: ignore[arg-type]
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        ),
    )
    none = SimpleNamespace(temperature=None, top_p=None, top_k=None, min_p=None, repetition_penalty=None)
    plan: Any = SimpleNamespace(
        checkpoint=SimpleNamespace(name="fake-model", tokenizer=tokenizer, generation=none),
        context=CONTEXT,
        limits=Limits(CONTEXT, VOCAB, blocks.most_tokens),
        threads=SimpleNamespace(count=1),
    )
    engine = Engine(executor or Scripted(fake), scheduler, deliver=deliver)
    no_grammars: Any = SimpleNamespace()
    return Loaded(plan, engine, gate or Gate(1000, 100_000), no_grammars)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Api, Api]]:
    """The same server over the fake and over the engine, both saying what one fake is told to say."""
    fake = FakeLLM()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_llm, "load", lambda model, *, deliver, **_: loaded(fake, deliver))
        with LiveServer(lambda: fake) as one, LiveServer(lambda: async_llm.AsyncLLM("scripted")) as other:
            yield Api(one.wait_ready(), fake), Api(other.wait_ready(), fake)


TEXTS = [
    "MONDAYTUESDAY",
    "MONDAYT",
    "😀霓é👩‍👩‍👧",
    "hello world, MONDAY\n2. A farm",
    "aabaabaab",
    "",
    "é" * 30,
]
STOPS = [None, [], ["DAYTUE"], ["AYT", "TUES"], ["MONDAYTUES", "TUE"], ["aab"], ["霓"], ["é👩"], ["x"], ["\n2", " A"]]
PROMPTS = ["hi", "\n2. A farm with 15", "中文 😀", ["a", "bcdefghijkl"], [5, 6, 7], [[1], [300 - 1] * 40], "<|turn|>x"]


def plain(answer: dict[str, Any]) -> dict[str, Any]:
    """Without what depends on who asked before: the prompt's cached tokens."""
    told = {key: answer.get(key) for key in ("choices", "usage", "error", "object", "model")}
    (told["usage"] or {}).pop("prompt_tokens_details", None)
    return told


def merged(events: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Choices of a stream put together; how they are cut into chunks is each engine's own."""
    out: dict[int, dict[str, Any]] = {}
    for event in events:
        for part in event["choices"]:
            choice = out.setdefault(part["index"], {"text": "", "logprobs": {}})
            choice["text"] += part.get("text", "") + part.get("delta", {}).get("content", "")
            for key, values in (part["logprobs"] or {}).items():
                choice["logprobs"][key] = choice["logprobs"].get(key, []) + (values or [])
            choice |= {key: part[key] for key in ("finish_reason", "stop_reason", "seed") if part.get(key) is not None}
    return out


@pytest.mark.parametrize("trial", range(60))
def test_engine_answers_as_the_definition(pair: tuple[Api, Api], trial: int) -> None:
    fake, real = pair
    rng = random.Random(trial)
    fake.llm.reset()
    fake.llm.says(rng.choice(TEXTS))
    body: dict[str, Any] = {
        "seed": trial,
        "n": rng.choice([1, 1, 3]),
        "max_tokens": rng.choice([1, 2, 3, 5, 9, 20, 60]),
        "stop": rng.choice(STOPS),
        "include_stop_str_in_output": rng.random() < 0.3,
        "skip_special_tokens": rng.random() < 0.7,
        "ignore_eos": rng.random() < 0.2,
        "stop_token_ids": rng.choice([[], [], [0xC3], [260]]),
    }
    if rng.random() < 0.6:
        body |= {"prompt": rng.choice(PROMPTS), "echo": rng.random() < 0.5, "logprobs": rng.choice([None, 0, 1, 4])}
        ways = [(fake.complete, real.complete), (fake.complete_events, real.complete_events)]
    else:
        body |= rng.choice([{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3}])
        ways = [(fake.chat, real.chat), (fake.chat_events, real.chat_events)]
    (ask_fake, ask_real), (stream_fake, stream_real) = ways
    assert plain(ask_real(**body).json()) == plain(ask_fake(**body).json()), body
    assert merged(stream_real(**body)) == merged(stream_fake(**body)), body


def test_errors_of_rows_reach_the_client(pair: tuple[Api, Api]) -> None:
    fake, real = pair
    fake.llm.reset()
    fake.llm.says("hello world", fails_after=1)
    failed = real.chat()
    assert failed.status_code == 500
    assert "not finite" in failed.json()["error"]["message"]
    assert b"not finite" in real.chat(stream=True).content
    fake.llm.reset()
    assert real.chat().status_code == 200


def test_choices_that_overtake_the_prompt(pair: tuple[Api, Api]) -> None:
    """Siblings share the prompt's blocks; its log-probabilities come with the first choice only."""
    _, real = pair
    body = {"prompt": "x" * 100, "echo": True, "logprobs": 1, "n": 4, "max_tokens": 3, "seed": 1}
    choices = real.complete(**body).json()["choices"]
    assert len({str(choice["logprobs"]) for choice in choices}) == 1
    assert all(len(choice["logprobs"]["tokens"]) == 103 for choice in choices)


def test_fake_tokenizer_is_enough() -> None:
    stream = TextStream(FakeTokenizer())  # type: ignore[arg-type]
    assert "".join(stream.feed(token)[1] for token in "é!".encode()) == "é!"
