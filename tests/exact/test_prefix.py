"""A cached prefix never changes an answer: tokens, and log-probabilities to the last bit, cold and warm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, OptionError, RequestOutput, SamplingParams
from headrace.config import KV_FORMATS
from headrace.engine.admission import LONGEST
from tests.exact.test_engine import told
from tests.models.tiny import tiny_checkpoint

PLAIN = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=3)
SEEDED = SamplingParams(
    temperature=0.9, seed=7, max_tokens=9, ignore_eos=True, logprobs=3, frequency_penalty=0.7, repetition_penalty=1.2
)
TWO = SamplingParams(temperature=1, seed=3, n=2, max_tokens=6, ignore_eos=True, logprobs=0)
KINDS = (PLAIN, SEEDED, TWO)
BASE = np.random.default_rng(6).integers(0, 256, 330).tolist()
COMMON: dict[str, Any] = {"threads": 2, "context": 512, "pool_bytes": 1 << 24, "weight_cache": False}


def prompts() -> list[list[int]]:
    """They share 1 to 300 tokens with `BASE`, around borders of blocks, and go on in their own way or not at all."""
    rng = np.random.default_rng(8)
    lengths = [n + d for n in (32, 64, 96, 160, 256) for d in (-2, -1, 0, 1, 2)] + [1, 2, 5, 17, 300]
    own = [rng.integers(0, 256, int(rng.choice([0, 1, 2, 31, 33]))).tolist() for _ in lengths]
    return [BASE[:length] + more for length, more in zip(lengths, own, strict=True)]


PARAMS = [KINDS[i % 3] for i in range(len(prompts()))]


def cached(outputs: list[RequestOutput]) -> int:
    return sum(o.outputs[0].timings.cached for o in outputs if o.outputs[0].timings is not None)


@pytest.fixture(params=["k_quants", "blocks_of_32", "bf16_windows", "gemma"])
def path(request: pytest.FixtureRequest, tiny_path: Callable[[str], Path], tmp_path: Path) -> Path:
    """The last two have layers with a window."""
    if request.param == "gemma":
        return tiny_checkpoint(tmp_path, "gemma3_text", sliding_window=48)
    return tiny_path(request.param)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_cold_and_warm_are_the_same_bits(path: Path, kv_format: str, tmp_path: Path) -> None:
    options = COMMON | {"kv_format": kv_format}
    with LLM(path, prefix_cache=False, **options) as llm:
        want = [told(llm.generate(p, params)[0]) for p, params in zip(prompts(), PARAMS, strict=True)]
        assert llm.model.stats().prefix_hits == 0 or TWO in PARAMS
        block = llm.model.plan.memory.pool.block_bytes * len(llm.model.plan.program.kv.groups)
    with LLM(path, **options) as llm:
        llm.generate(BASE, PLAIN)
        for _ in range(2):  # the second finds the ends of the first's answers too
            got = [llm.generate(p, params)[0] for p, params in zip(prompts(), PARAMS, strict=True)]
            assert [told(o) for o in got] == want
            assert cached(got) > 2000
            assert any(cached([output]) % 32 for output in got), "a part of a block was copied"
        assert [told(o) for o in llm.generate(prompts(), PARAMS)] == want
    with LLM(path, budget=33, **options) as llm:  # all at once: what they share is computed by whoever is first
        got = llm.generate(prompts(), PARAMS)
        assert [told(o) for o in got] == want
        assert cached(got) > 1000
    small = options | {"pool_bytes": 16 * block, "cache_dir": str(tmp_path / "tier")}
    for round in range(2):
        with LLM(path, **small) as llm:  # what is given up comes back from the disk
            assert [told(o) for o in llm.generate(prompts(), PARAMS)] == want
            assert [told(o) for o in llm.generate(prompts()[::-1], PARAMS[::-1])] == want[::-1]
            stats = llm.model.stats()
            assert stats.tier_loads > 0 and (round or stats.tier_saves > 0)


def test_log_probabilities_of_the_prompt_read_nothing(path: Path) -> None:
    every = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1, prompt_logprobs=2)
    with LLM(path, prefix_cache=False, **COMMON) as llm:
        want = told(llm.generate(BASE, every)[0])
    with LLM(path, **COMMON) as llm:
        llm.generate(BASE, PLAIN)
        got = llm.generate(BASE, every)
        assert told(got[0]) == want
        assert cached(got) == 0
        assert cached(llm.generate(BASE, PLAIN)) == len(BASE) - 1, "what it computed, others may read"


def test_the_next_turn_finds_the_answer_before_it(path: Path) -> None:
    with LLM(path, prefix_cache=False, **COMMON) as cold, LLM(path, **COMMON) as warm:
        talk = BASE[:40]
        for turn in range(4):
            want, got = (llm.generate(talk, SEEDED)[0] for llm in (cold, warm))
            assert told(got) == told(want)
            if turn:
                assert cached([got]) >= len(talk) - 7 - 1, "all but the last token of the answer, and the new question"
            talk = talk + got.outputs[0].token_ids + BASE[turn : turn + 6]


def test_salts_keep_tenants_apart(path: Path) -> None:
    def ask(llm: LLM, salt: str) -> RequestOutput:
        return llm.generate(BASE, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, cache_salt=salt))[0]

    with LLM(path, **COMMON) as llm:
        first = [ask(llm, salt) for salt in ("", "a", "b")]
        assert cached(first) == 0
        again = [ask(llm, salt) for salt in ("", "a", "b")]
        assert cached(again) == 3 * (len(BASE) - 1)
        assert len({str(told(o)) for o in (*first, *again)}) == 1


def test_a_pinned_prefix_stays(path: Path, tmp_path: Path) -> None:
    """However much else goes through the pool; what lies on no disk would have to be computed again."""
    text = tmp_path / "system.txt"
    text.write_text("You are a careful assistant. " * 8, encoding="utf-8")
    greedy = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    rng = np.random.default_rng(1)
    with LLM(path, **COMMON) as llm:
        block = llm.model.plan.memory.pool.block_bytes * len(llm.model.plan.program.kv.groups)
    for pin in (None, str(text)):
        with LLM(path, **COMMON | {"pool_bytes": 24 * block, "pin_prefix": pin}) as llm:
            ids = llm.tokenizer.encode(text.read_text(encoding="utf-8"))
            llm.generate([ids], greedy)
            for _ in range(6):
                llm.generate(rng.integers(0, 256, 300).tolist(), greedy)
            assert cached(llm.generate([[*ids, 5]], greedy)) == (len(ids) // 32 * 32 if pin else 0)


BAD = {
    "system.txt": ["short", "long " * 400, "x" * (LONGEST + 1), b"\xff" * 60],
    "system.json": ["[" * 100_000, '[{"role":'],
    "~nobody-has-this-name/system.txt": [None],
    "nowhere/system.txt": [None],
}


@pytest.mark.parametrize(
    ("name", "content"), [(name, content) for name, contents in BAD.items() for content in contents], ids=range(8)
)
def test_what_cannot_be_pinned_is_refused(
    name: str, content: str | bytes | None, tmp_path: Path, tiny_path: Callable[[str], Path]
) -> None:
    file = name if name[0] == "~" else str(tmp_path / name)
    if content is not None:
        Path(file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(OptionError, match=r"pin_prefix .*system\.") as refused:
        LLM(tiny_path("k_quants"), pin_prefix=file, **COMMON)
    assert len(str(refused.value)) < 500


def test_what_can_be_pinned_can_be_asked_for(path: Path, tmp_path: Path) -> None:
    """In pools of every small size, an odd number of blocks among them."""
    text = tmp_path / "system.txt"
    with LLM(path, **COMMON) as llm:
        block = llm.model.plan.memory.pool.block_bytes * len(llm.model.plan.program.kv.groups)
    pinned = 0
    for blocks in (1, 2, 3, 5, 6):
        for length in (32, 33, 64, 65, 100):
            text.write_text("x" * length, encoding="utf-8")
            try:
                llm = LLM(path, **COMMON | {"pool_bytes": blocks * block, "pin_prefix": str(text)})
            except OptionError:
                continue
            with llm:
                ids = llm.tokenizer.encode("x" * length)
                [output] = llm.generate([ids], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
                assert output.outputs[0].finish_reason == "length"
                llm.model._engine._scheduler.check()
                pinned += 1
    assert pinned >= 8
