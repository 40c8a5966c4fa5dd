"""The promise on real files: logits bit for bit the same, and Gemma's windows where they first are full (case K5)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace import native
from headrace.loading.checkpoint import open_checkpoint
from tests.exact.company import Company, Row, same
from tests.models.running import Model

TEXT = (
    "A mill race is the current of water that turns a water wheel, or the channel that leads it to or from the wheel. "
    "Compared with the broad waters of a mill pond, the narrow current is swift and powerful. The race leading to the "
    "wheel is called the head race, the one that carries the water away from it the tail race. "
)


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Model:
    return Model.open(smollm2)


@pytest.fixture(scope="module")
def tokens(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """530 of a text."""
    tokenizer = open_checkpoint(smollm2, cache_dir=tmp_path_factory.mktemp("tokenizer")).tokenizer
    return list(tokenizer.encode(8 * TEXT))[:530]


SOME = {0, 1, 15, 31, 32, 100, 480, 511, 512, 529}


@pytest.fixture(scope="module")
def want(model: Model, tokens: list[int]) -> dict[int, np.ndarray]:
    """In one chunk, on one thread, by the best instruction set."""
    return Company(model, threads=1).alone(tokens, (), SOME)


def test_smollm2_in_chunks(model: Model, tokens: list[int], want: dict[int, np.ndarray]) -> None:
    for threads, fuse, chunks in [
        (2, True, [1] * 34),
        (3, False, [16] * 33),
        (2, True, [33] * 16),
        (3, True, [512]),
        (2, False, []),
    ]:
        got = Company(model, threads=threads, fuse=fuse).alone(tokens, chunks, SOME)
        for position, line in got.items():
            assert same(line, want[position]), (position, chunks[:1], threads, fuse)
        assert got.keys() == SOME


@pytest.mark.parametrize(("rows", "kv_format"), [(2, "bf16"), (7, "bf16"), (32, "bf16"), (7, "int8"), (32, "int4")])
def test_smollm2_in_company(rows: int, kv_format: str, model: Model, tokens: list[int]) -> None:
    """Prompts that begin at different places of the text."""
    count = rows + 3
    prompts = [tokens[7 * n : 7 * n + 3 + n] for n in range(count)]
    alone, company = Company(model, kv_format, threads=1), Company(model, kv_format, threads=2, tokens=4000)
    ends = {n + 2 for n in range(0, count, 3)} | {0}
    each = {n: alone.alone(prompts[n], (), ends) for n in range(0, count, 3)}
    seen = 0
    for (request, position), line in company.together(prompts, np.random.default_rng(1), rows=rows, wanted=ends):
        if request in each:
            seen += 1
            assert same(line, each[request][position]), (request, position)
    assert seen >= sum(map(len, each.values()))


@pytest.mark.parametrize(
    ("isa", "kv_format"), [*((isa, "bf16") for isa in native.isas()[1:]), (native.isas()[-1], "int4")]
)
def test_smollm2_on_every_instruction_set(isa: str, kv_format: str, model: Model, tokens: list[int]) -> None:
    """Two prompts, then 8 tokens each, greedily; both in one batch."""
    prompts = [tokens[:4], tokens[40:47]]
    best, other = Company(model, kv_format, threads=2), Company(model, kv_format, isa=isa, threads=2)
    for one in (best, other):
        one.step([Row(n, 0, prompt[:-1], ()) for n, prompt in enumerate(prompts)])
    for _ in range(8):
        rows = [Row(n, len(prompt) - 1, prompt[-1:]) for n, prompt in enumerate(prompts)]
        got, expected = other.step(rows), best.step(rows)
        for n, prompt in enumerate(prompts):
            line = expected[n, len(prompt) - 1]
            assert same(got[n, len(prompt) - 1], line), (isa, prompt)
            prompts[n] = [*prompt, int(line.argmax())]


# ---- case K5


LENGTHS = [*range(510, 515), *range(1022, 1027)]
DECODED = 20


def test_k5_where_a_window_is_first_full(test_model: Callable[[str], Path]) -> None:
    """Gemma's window is 512. Whatever the chunks: each prompt's next token, and 20 more, have the logits of a single
    pass over everything."""
    model = Model.open(test_model("gemma3-270m"))
    text = np.random.default_rng(1).integers(1000, 90_000, LENGTHS[-1] + DECODED).tolist()
    asked = {n - 1 for n in LENGTHS} | {LENGTHS[4] + DECODED - 1, LENGTHS[-1] + DECODED - 1}
    want = Company(model, threads=2).alone(text, (), asked)
    company = Company(model, threads=2, tokens=4000)
    assert 512 in company.windows
    ways = {512: [511, 514, 1024], 16: [510], 100: [512, 1022, 1025], 513: [513, 1023, 1026]}
    assert sorted(n for lengths in ways.values() for n in lengths) == LENGTHS
    for size, lengths in ways.items():
        for length in lengths:
            for start in range(0, length, size):
                chunk = text[start : min(start + size, length)]
                got = company.step([Row(length, start, chunk, asked)])
                check(got, want, (size, length))
        for ahead in range(DECODED):  # all of them side by side
            rows = [Row(n, n + ahead, [text[n + ahead]], asked) for n in lengths]
            check(company.step(rows), want, (size, lengths))
        for length in lengths:
            company.release(length)


def check(got: dict[tuple[int, int], np.ndarray], want: dict[int, np.ndarray], where: object) -> None:
    for (_, position), line in got.items():
        assert same(line, want[position]), (position, where)
