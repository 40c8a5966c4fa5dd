"""The Python API on a tiny random model: what goes in, what comes out, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import (
    LLM,
    AsyncLLM,
    EngineDeadError,
    HeadraceError,
    OptionError,
    RequestError,
    SamplingParams,
    native,
)
from headrace.config import Options
from headrace.engine import prompts as prompts_module
from headrace.engine.build import plan_engine
from headrace.program.backend import Announced, Largest
from headrace.tokenize import tokenizer
from tests.models.tiny import tiny_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = [5, 9, 14, 3, 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, pool_bytes=1 << 22, budget=48, threads=1) as llm:
        yield llm


def test_prompts_of_every_kind_in_order(llm: LLM) -> None:
    text = "the river bends twice"
    ids = llm.tokenizer.encode(text)
    several = llm.generate([text, ids, PROMPT], GREEDY)
    assert [o.prompt for o in several] == [text, None, None]
    assert several[0].prompt_token_ids == ids
    assert several[0].outputs[0].token_ids == several[1].outputs[0].token_ids
    assert len(llm.generate(text, GREEDY)) == len(llm.generate(ids, GREEDY)) == 1
    for output in several:
        assert output.finished
        assert output.outputs[0].finish_reason == "length"
        assert len(output.outputs[0].token_ids) == 12
        assert "".join(output.outputs[0].pieces) == output.outputs[0].text
        assert output.outputs[0].timings is not None
        assert 0 < output.outputs[0].timings.first_token_s <= output.outputs[0].timings.total_s


def test_params_for_each_prompt(llm: LLM) -> None:
    lengths = [1, 7, 3]
    outputs = llm.generate([PROMPT] * 3, [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths])
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    with pytest.raises(RequestError, match="2 entries for 3 prompts"):
        llm.generate([PROMPT] * 3, [GREEDY, GREEDY])


def test_stream_joins_to_the_whole(llm: LLM) -> None:
    whole = llm.generate(PROMPT, GREEDY)[0].outputs[0]
    chunks = list(llm.stream(PROMPT, GREEDY))
    assert "".join(c.text for c in chunks) == whole.text
    assert [t for c in chunks for t in c.token_ids] == whole.token_ids
    assert [c.finish_reason for c in chunks if c.finish_reason] == ["length"]


def test_leaving_a_stream_gives_everything_back(llm: LLM) -> None:
    with llm.stream(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True)) as stream:
        next(stream)
    wait_until(lambda: llm.model.stats().running == 0 and llm.model.stats().blocks_used == 0)
    iterator = llm.stream(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True))
    next(iterator)
    del iterator
    wait_until(lambda: llm.model.stats().blocks_used == 0)


def test_seeds(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, seed=7, n=3, max_tokens=12, ignore_eos=True)
    first, again = llm.generate([PROMPT, PROMPT], params)
    choices = [c.token_ids for c in first.outputs]
    assert [c.token_ids for c in again.outputs] == choices
    assert len({tuple(c) for c in choices}) == 3
    drawn = llm.generate(PROMPT, SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True))[0]
    repeated = llm.generate(PROMPT, SamplingParams(temperature=1.5, seed=drawn.seed, max_tokens=12, ignore_eos=True))[0]
    assert repeated.outputs[0].token_ids == drawn.outputs[0].token_ids


def test_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    output = llm.generate(PROMPT, params)[0]
    choice = output.outputs[0]
    assert choice.logprobs is not None
    assert output.prompt_logprobs is not None
    assert [next(iter(p)) for p in choice.logprobs] == choice.token_ids
    assert all(len(p) == 3 and next(iter(p.values())).rank == 1 for p in choice.logprobs)
    assert choice.cumulative_logprob == pytest.approx(sum(next(iter(p.values())).logprob for p in choice.logprobs))
    assert output.prompt_logprobs[0] is None
    assert [next(iter(p)) for p in output.prompt_logprobs[1:] if p] == PROMPT[1:]
    forced = llm.generate(
        PROMPT + choice.token_ids[:1], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    )[0]
    assert forced.prompt_logprobs is not None
    again = forced.prompt_logprobs[-1]
    assert again is not None
    assert again[choice.token_ids[0]].logprob == pytest.approx(
        choice.logprobs[0][choice.token_ids[0]].logprob, abs=1e-4
    )


def test_only_the_prompts_logprobs(llm: LLM) -> None:
    output = llm.generate(PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=1))[0]
    assert output.outputs[0].token_ids == []
    assert output.outputs[0].finish_reason == "length"
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(PROMPT)


def test_stop_strings_and_ids(llm: LLM) -> None:
    free = llm.generate(PROMPT, GREEDY)[0].outputs[0]
    marker = next(t for i, t in enumerate(free.token_ids) if i >= 3 and t not in free.token_ids[:i])
    at = free.token_ids.index(marker)
    by_id = llm.generate(
        PROMPT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[marker])
    )[0].outputs[0]
    assert by_id.token_ids == free.token_ids[: at + 1]
    assert (by_id.finish_reason, by_id.stop_reason) == ("stop", marker)
    piece = free.text[2:5]
    by_text = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=[piece]))[0]
    assert by_text.outputs[0].text == free.text[: free.text.index(piece)]
    assert by_text.outputs[0].stop_reason == piece


BAD: list[tuple[Any, dict[str, Any], str]] = [
    ([], {}, "prompts"),
    ("", {}, "prompt"),
    ([[1, 2], []], {}, "prompts[1]"),
    ([PROMPT, PROMPT, [10**6]], {}, "prompts[2]"),
    (["a", "half a pair \ud800"], {}, "prompts[1]"),
    ([[]], {}, "prompt"),
    ([-1], {}, "prompt"),
    ([10**6], {}, "prompt"),
    ([2**63], {}, "prompt"),
    (PROMPT, {"stop_token_ids": [10**6]}, "stop_token_ids[0]"),
    (PROMPT, {"logit_bias": {10**6: 5}}, "logit_bias.1000000"),
    (PROMPT, {"max_tokens": 10**6}, "max_tokens"),
    (PROMPT, {"min_tokens": 10**6}, "min_tokens"),
    ([1] * 10**5, {}, "prompt"),
]


@pytest.mark.parametrize(("prompt", "fields", "param"), BAD)
def test_refused_before_anything_runs(llm: LLM, prompt: Any, fields: dict[str, Any], param: str) -> None:
    before = llm.model.stats().tokens_in
    running = llm.stream(PROMPT, GREEDY)
    with pytest.raises(RequestError) as error:
        llm.generate(prompt, SamplingParams(**fields))
    assert error.value.param == param
    assert [t for c in running for t in c.token_ids] == llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    assert llm.model.stats().tokens_in == before + 2 * len(PROMPT)


def test_chat(llm: LLM) -> None:
    talk = [{"role": "user", "content": "hello"}]
    ids = llm.tokenizer.chat(talk)
    output = llm.chat(talk, GREEDY)[0]
    assert output.prompt_token_ids == ids
    assert output.outputs[0].token_ids == llm.generate(ids, GREEDY)[0].outputs[0].token_ids
    assert len(llm.chat([talk, talk], GREEDY)) == 2
    assert "".join(c.text for c in llm.stream_chat(talk, GREEDY)) == output.outputs[0].text
    with pytest.raises(RequestError) as error:
        llm.chat([], GREEDY)
    assert error.value.param == "messages"


def test_options(folder: Path) -> None:
    with pytest.raises(OptionError, match="unknown option 'colour'"):
        LLM(folder, colour="red")
    with pytest.raises(OptionError, match="the model was made for"):
        LLM(folder, context=10**7)
    with pytest.raises(OptionError, match="pool_bytes must be at least"):
        LLM(folder, pool_bytes=1)


@pytest.mark.parametrize(
    ("kv_format", "how"),
    [
        ("bf16", "bfloat16 queries, keys, values"),
        ("f32", "float32"),
        ("int8", "bfloat16 queries and shares, keys and values as their codes"),
        ("int4", "bfloat16 queries and shares, keys and values as their codes"),
    ],
)
def test_members_tell_the_format_of_keys_and_values(kv_format: str, how: str, folder: Path) -> None:
    for backend in ("native", "torch"):
        members = plan_engine(folder, Options.of(kv_format=kv_format, backend=backend)).members
        formats = {m.operation: m.format for m in members}
        assert formats["attend"] == formats["store"] == kv_format
        assert formats["rotate"] == ""
        if backend == "native":
            [attend] = [m for m in members if m.operation == "attend"]
            assert attend.how.startswith(how)


def test_step_buffers_are_those_of_prompts_whose_logprobs_are_wanted(folder: Path) -> None:
    few, many = (plan_engine(folder, Options.of(rows=rows, budget=48)).memory.buffers for rows in (1, 64))
    program = plan_engine(folder, Options.of()).program
    widest = 4 * (program.vocab + program.width) * 48
    assert few == many >= widest


def test_body_and_head_keep_their_buffers_side_by_side(folder: Path) -> None:
    plan = plan_engine(folder, Options.of())
    tensors, parts = plan.checkpoint.source.tensors, plan.checkpoint.parts
    announced = {name: Announced(part.shape, tensors[part.tensor].format) for name, part in parts.items()}

    def size(*step: int, threads: int = 2, context: int = 512) -> int:
        return plan.backend.buffer_bytes(plan.program, announced, Largest(*step, threads, context))

    assert size(48, 48, 48) + size(0, 0, 0) == size(48, 48, 0) + size(0, 0, 48)
    row = size(0, 0, 0, threads=0)
    assert size(1, 1, 1, threads=0) == 2 * row > 0, "one more than there are"
    assert size(0, 0, 0, threads=4, context=1024) - row == 4 * (size(0, 0, 0) - row) > 0


def test_openmp_is_told_to_sleep_where_a_model_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "")  # so that it is put back
    monkeypatch.delenv("OMP_WAIT_POLICY")
    plan_engine(folder, Options.of(backend="torch"))
    LLM(folder, threads=1, pool_bytes=1 << 22).close()
    assert "OMP_WAIT_POLICY" not in os.environ, "only PyTorch uses OpenMP, and showing computes nothing"
    LLM(folder, threads=1, pool_bytes=1 << 22, backend="torch").close()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    LLM(folder, threads=1, pool_bytes=1 << 22, backend="torch").close()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


def test_openmp_is_told_before_pytorch_is_loaded(folder: Path) -> None:
    code = f"""
import os, sys
def told(event, args):
    if event == "import" and args[0] == "torch":
        print(os.environ.get("OMP_WAIT_POLICY"))
sys.addaudithook(told)
from headrace import LLM
LLM({str(folder)!r}, threads=1, pool_bytes=1 << 22, backend="torch").close()
"""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "PASSIVE\n"


def test_a_pool_smaller_than_the_context(folder: Path) -> None:
    """Case K1 on the real executor: too large is refused with numbers, what outgrows the pool ends by length."""
    with LLM(folder, threads=1) as probe:
        block = probe.model.plan.memory.pool.block_bytes
    with LLM(folder, threads=1, pool_bytes=4 * block) as llm:
        assert llm.model.plan.limits.pool_tokens == 128
        with pytest.raises(RequestError, match="the KV pool holds 128"):
            llm.generate([[3] * 129], GREEDY)
        outgrown = llm.generate([[3] * 100], SamplingParams(max_tokens=100, ignore_eos=True))[0].outputs[0]
        assert outgrown.finish_reason == "length"
        assert len(outgrown.token_ids) == 29
        assert len(llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids) == 12


def test_crowded_equals_alone(folder: Path, llm: LLM) -> None:
    """Preemption, chunks and company change no answer. Choices begin together, so some of them must be preempted."""
    prompts = [[(7 * i + j) % 60 + 3 for j in range(5 + 11 * i)] for i in range(8)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    choices = SamplingParams(seed=5, n=8, max_tokens=60, ignore_eos=True)
    alone = [llm.generate(p, params)[0].outputs[0].token_ids for p in prompts]
    roomy = [choice.token_ids for choice in llm.generate(prompts[3], choices)[0].outputs]
    with LLM(folder, threads=1) as probe:
        block = probe.model.plan.memory.pool.block_bytes
    with LLM(folder, threads=1, pool_bytes=8 * block, budget=33) as crowded:
        together = crowded.generate(prompts, params)
        assert [o.outputs[0].token_ids for o in together] == alone
        assert [choice.token_ids for choice in crowded.generate(prompts[3], choices)[0].outputs] == roomy
        assert crowded.model.stats().preemptions > 0
        assert crowded.model.stats().blocks_used == 0


def test_a_fork_before_first_use(folder: Path) -> None:
    with LLM(folder, threads=1, pool_bytes=1 << 22) as llm:
        child = os.fork()
        if child == 0:
            try:
                ok = len(llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids) == 12
            except BaseException:
                ok = False
            os._exit(0 if ok else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids) == 12


def test_a_stream_ends_in_a_fork_and_goes_on_in_the_parent(folder: Path) -> None:
    with LLM(folder, threads=1, pool_bytes=1 << 22) as llm:
        stream = llm.stream(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True))
        next(stream)
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            last = list(stream)[-1]
            os._exit(0 if last.finish_reason == "error" and "forked" in (last.error or "") else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert [chunk.finish_reason for chunk in stream][-1] == "length"


def test_close_ends_what_runs(folder: Path) -> None:
    llm = LLM(folder, threads=1, pool_bytes=1 << 22)
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    closer = threading.Thread(target=llm.close)
    closer.start()
    assert [c.finish_reason for c in stream][-1] == "abort"
    closer.join()
    with pytest.raises(EngineDeadError):
        llm.generate(PROMPT, GREEDY)


def test_a_failing_step_reaches_everyone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.execute.local import LocalExecutor

    llm = LLM(folder, threads=1, pool_bytes=1 << 22)
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)

    def broken(*_: Any) -> None:
        raise RuntimeError("the roof fell in")

    monkeypatch.setattr(LocalExecutor, "run", broken)
    last = list(stream)[-1]
    assert last.finish_reason == "error"
    assert "the roof fell in" in (last.error or "")
    assert "the roof fell in" in (llm.model.dead or "")
    with pytest.raises(EngineDeadError):
        llm.generate(PROMPT, GREEDY)
    llm.close()


def test_async(folder: Path, llm: LLM) -> None:
    want = llm.generate(PROMPT, GREEDY)[0].outputs[0]

    async def main() -> None:
        engine = await AsyncLLM.load(folder, pool_bytes=1 << 22, threads=1)
        outputs = await asyncio.gather(*(engine.generate(PROMPT, GREEDY) for _ in range(5)))
        assert all(o.outputs[0].token_ids == want.token_ids for o in outputs)
        text = "".join([c.text async for c in await engine.stream(PROMPT, GREEDY)])
        assert text == want.text
        chat = await engine.chat([{"role": "user", "content": "hello"}], GREEDY)
        assert (
            chat.outputs[0].token_ids
            == llm.chat([{"role": "user", "content": "hello"}], GREEDY)[0].outputs[0].token_ids
        )
        with pytest.raises(RequestError):
            await engine.generate([])
        task = asyncio.ensure_future(engine.generate(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True)))
        await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stream = engine.submit(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True))
        await anext(stream)
        engine.abort(stream.request_id)
        assert [c.finish_reason async for c in stream][-1] == "abort"
        while engine.stats().blocks_used or engine.stats().running:
            await asyncio.sleep(0.01)
        engine.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_tiny_temperatures_are_greedy(llm: LLM) -> None:
    want = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    for temperature in (1e-8, 1e-300, 5e-324):
        params = SamplingParams(temperature=temperature, max_tokens=12, ignore_eos=True)
        assert llm.generate(PROMPT, params)[0].outputs[0].token_ids == want


def test_penalties_at_the_first_token(llm: LLM) -> None:
    """Case P4: presence and frequency look at the answer alone, repetition at the prompt too."""

    def first(**fields: Any) -> dict[int, float]:
        params = SamplingParams(temperature=1, max_tokens=1, logprobs=60, logprobs_mode="processed", seed=1, **fields)
        return {t: p.logprob for t, p in llm.generate(PROMPT * 2, params)[0].outputs[0].logprobs[0].items()}  # type: ignore[index]

    plain, presence, repetition = first(), first(presence_penalty=2.0), first(repetition_penalty=1.5)
    assert presence == plain
    moved = {t for t in set(plain) & set(repetition) if not math.isclose(plain[t], repetition[t], abs_tol=1e-6)}
    gaps = {t: plain[t] - repetition[t] for t in set(plain) & set(repetition)}
    assert moved
    still = {round(g, 5) for t, g in gaps.items() if t not in PROMPT}
    assert len(still) == 1, "logits outside the prompt moved against each other"


def wait_until(condition: Any, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def test_closing_ends_whoever_iterates(llm: LLM) -> None:
    long = SamplingParams(max_tokens=200, ignore_eos=True)
    stream = llm.stream(PROMPT, long)
    next(stream)
    stream.close()
    assert len(list(stream)) < 200
    with pytest.raises(StopIteration):
        next(stream)
    other = llm.stream(PROMPT, long)
    reader = threading.Thread(target=lambda: list(other), daemon=True)
    reader.start()
    other.close()
    reader.join(10)
    assert not reader.is_alive()


@pytest.mark.parametrize(("prompt", "params", "param"), [(3.5, None, "prompt"), (PROMPT, {"n": 2}, "params")])
def test_what_is_no_prompt_and_no_params(llm: LLM, prompt: Any, params: Any, param: str) -> None:
    with pytest.raises(RequestError) as error:
        llm.stream(prompt, params)
    assert error.value.param == param


def test_threads_that_cannot_be_had_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call by itself: the next one, when there are threads again, is served."""

    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with (
        LLM(folder, pool_bytes=1 << 22, threads=1, weight_cache=False) as llm,
        contextlib.closing(AsyncLLM(folder, pool_bytes=1 << 22, threads=1, weight_cache=False)) as engine,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", none_left)
            with pytest.raises(HeadraceError, match="no thread to give for the engine"):
                llm.generate(PROMPT, GREEDY)
            with pytest.raises(HeadraceError, match="no thread to give for this request"):
                asyncio.run(engine.generate("ab", GREEDY))
        want = llm.generate("ab", GREEDY)[0].outputs[0].token_ids
        assert asyncio.run(engine.generate("ab", GREEDY)).outputs[0].token_ids == want


def test_an_instruction_set_that_is_not_here_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "isas", lambda: ["portable"])
    monkeypatch.setattr(native, "survey", lambda: [("amx", "the processor lacks AMX_TILE"), ("portable", "")])
    with pytest.raises(
        OptionError, match=r"isa must be one of portable on this machine, not 'amx': the processor lacks"
    ):
        LLM(folder, isa="amx")


def test_texts_far_longer_than_the_context_are_not_put_into_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    real = tokenizer._ids
    monkeypatch.setattr(tokenizer, "_ids", lambda engine, text: (sizes.append(len(text)), real(engine, text))[1])
    monkeypatch.setattr(prompts_module, "PROBES", (4096, 8192))
    dense, late = "ab " * 50_000, " " * 5000 + "ab " * 50_000
    with contextlib.closing(AsyncLLM(folder, pool_bytes=1 << 22, threads=1)) as engine:
        for text in (dense, late):
            with pytest.raises(RequestError, match=r"characters alone are .* tokens, but the context has") as error:
                asyncio.run(engine.encode(text))
            assert error.value.param == "prompt"
        with pytest.raises(RequestError, match="characters alone") as error:
            asyncio.run(engine.render_chat([{"role": "user", "content": "a"}, {"role": "user", "content": dense}]))
        assert error.value.param == "messages[1].content"
        assert max(sizes) <= 8192
        short = "ab " * 5000
        assert asyncio.run(engine.encode(short)) == engine.tokenizer.encode(short)


def test_async_streams_that_are_left(folder: Path) -> None:
    """Aborted by another task, dropped, or of a loop that was closed: nobody hangs, nothing is kept."""
    long = SamplingParams(max_tokens=200, ignore_eos=True)
    engine = AsyncLLM(folder, pool_bytes=1 << 22, threads=1)

    async def leave() -> None:
        stream = engine.submit(PROMPT, long)
        reader = asyncio.ensure_future(stream.drain())
        await asyncio.sleep(0)
        stream.abort()
        assert not (await asyncio.wait_for(reader, 10)).finished
        async for _ in engine.submit(PROMPT, long):
            break
        while engine.stats().blocks_used or engine.stats().running:
            await asyncio.sleep(0.01)

    asyncio.run(leave())
    loop = asyncio.new_event_loop()

    async def begin() -> Any:
        return engine.submit(PROMPT, long)

    kept = loop.run_until_complete(begin())
    loop.close()
    wait_until(lambda: not engine._sinks and not engine.stats().blocks_used)
    assert not kept.output.finished
    assert engine.dead is None
    engine.close()


@pytest.mark.parametrize("prompts", [None, 5, {"a": 1}, b"abc", [b"abc"], [[1], None]])
def test_what_is_no_list_of_prompts(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate(prompts, GREEDY)


def test_one_message_is_no_conversation(llm: LLM) -> None:
    with pytest.raises(RequestError, match="list of messages"):
        llm.chat({"role": "user", "content": "hi"}, GREEDY)  # type: ignore[arg-type]


def test_token_ids_of_thousands_of_digits(llm: LLM) -> None:
    with pytest.raises(RequestError, match="no token id"):
        llm.generate([[10**5000]], GREEDY)


def test_a_pool_that_no_machine_has(folder: Path) -> None:
    for size in (10**18, 10**30):
        with pytest.raises(OptionError, match="free") as error:
            LLM(folder, pool_bytes=size, threads=1)
        assert error.value.option == "pool_bytes"


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_a_model_that_nobody_holds_is_given_back(folder: Path, kind: type[LLM] | type[AsyncLLM]) -> None:
    model = kind(folder, pool_bytes=1 << 22, threads=1)
    if isinstance(model, LLM):
        model.generate(PROMPT, GREEDY)
    else:
        asyncio.run(model.generate(PROMPT, GREEDY))
    found, thread = weakref.ref(model), model.model._engine._thread
    del model
    gc.collect()
    assert found() is None
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()


def test_long_texts_hold_up_no_short_ones(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = AsyncLLM(folder, pool_bytes=1 << 22, threads=1)
    free = threading.Event()
    real = engine.tokenizer.encode

    def slow(text: str, **options: Any) -> list[int]:
        if len(text) > 1 << 16:
            assert free.wait(20)
            return [1]
        return real(text, **options)

    monkeypatch.setattr(engine.tokenizer, "encode", slow)
    talk = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]

    async def ask() -> None:
        long = [asyncio.ensure_future(engine.encode("a" * (2 << 20))) for _ in range(4)]
        await asyncio.sleep(0.05)
        await asyncio.wait_for(engine.generate("abc", GREEDY), 10)
        await asyncio.wait_for(engine.chat(talk, GREEDY), 10)
        free.set()
        await asyncio.gather(*long)

    asyncio.run(ask())
    engine.close()


def test_async_after_close(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waited for the tokenizer, and whoever comes later, is told; nobody is cancelled."""
    engine = AsyncLLM(folder, pool_bytes=1 << 22, threads=1)
    free = threading.Event()

    def slow(text: str, **options: Any) -> list[int]:
        assert free.wait(20)
        return [1]

    monkeypatch.setattr(engine.tokenizer, "encode", slow)

    async def ask() -> None:
        tasks = [asyncio.ensure_future(engine.generate("abc", GREEDY)) for _ in range(6)]
        await asyncio.sleep(0.05)
        tasks[0].cancel()
        engine.close()
        free.set()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(ends[0], asyncio.CancelledError)
        assert all(isinstance(end, EngineDeadError) for end in ends[1:])
        with pytest.raises(EngineDeadError):
            await engine.generate("abc", GREEDY)
        with pytest.raises(EngineDeadError):
            await engine.chat([{"role": "user", "content": "a"}], GREEDY)

    asyncio.run(ask())


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_submitting_needs_a_running_loop(folder: Path) -> None:
    engine = AsyncLLM(folder, pool_bytes=1 << 22, threads=1)
    with pytest.raises(RuntimeError, match="no running event loop"):
        engine.submit(PROMPT, GREEDY)
    gc.collect()
    engine.close()


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_o3_a_library_installs_no_signal_handlers(folder: Path, kind: type[LLM] | type[AsyncLLM]) -> None:
    def handlers() -> list[Any]:
        return [signal.getsignal(sig) for sig in signal.valid_signals()]

    before = handlers()
    engine = kind(folder, pool_bytes=1 << 22, threads=1)
    if isinstance(engine, LLM):
        engine.generate(PROMPT, GREEDY)
    else:
        asyncio.run(engine.generate(PROMPT, GREEDY))
    assert handlers() == before
    engine.close()
    assert handlers() == before
