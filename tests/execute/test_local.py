"""The executor over a scripted runner, whose "attention" really reads the pool through the block tables."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cache.pool import Pool, PoolShape
from headrace.execute import local
from headrace.execute.local import LocalExecutor
from headrace.execute.plan import Admission, Plan, Row, RowResult, TokenLogprob, Want
from headrace.execute.sampler import NOT_FINITE
from headrace.params import SamplingParams
from headrace.program.backend import Batch
from headrace.program.program import KVGroup, KVLayout
from tests.execute.resolved import OFF

VOCAB = 16
BLOCK = 4
WINDOW = 6
POISON = 15
"""From this token on a sequence's logits are not finite."""


def numbers(pool: Pool, slot: int) -> np.ndarray:
    """float32 [blocks, key and value, 1, BLOCK, 1], a view."""
    return pool.slots[slot].view(np.float32).reshape(-1, 2, 1, BLOCK, 1)


class ToyRunner:
    """Writes each token into its block of each group, reads the sequence back through the tables, and makes logits of
    its checksum. Group 0 sees everything, group 1 the last WINDOW tokens.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.batches: list[Batch] = []
        self.lines: list[int] = []
        self.closed = False

    def run(self, batch: Batch) -> np.ndarray:
        self.batches.append(batch)
        hidden = np.full((len(batch.tokens), 3), np.nan, np.float32)
        for r in range(len(batch.lengths)):
            for i in range(batch.offsets[r], batch.offsets[r + 1]):
                position = int(batch.positions[i])
                for group, table in enumerate(batch.tables):
                    numbers(self.pool, group)[table[r, position // BLOCK], :, 0, position % BLOCK, 0] = (
                        batch.tokens[i] + 1
                    )
                everything = self.read(batch.tables[0][r], 0, 0, position)
                window = self.read(batch.tables[1][r], 1, max(0, position - WINDOW + 1), position)
                assert everything[-len(window) :] == window
                assert position < batch.lengths[r]
                crc = zlib.crc32(bytes(everything))
                hidden[i] = crc >> 16, crc & 0xFFFF, POISON + 1 in everything
        return hidden[batch.wanted]

    def read(self, table: np.ndarray, group: int, first: int, last: int) -> list[int]:
        found = [int(numbers(self.pool, group)[table[p // BLOCK], 0, 0, p % BLOCK, 0]) for p in range(first, last + 1)]
        assert 0 not in found, "a token that nobody wrote"
        assert all(table[p // BLOCK] >= 0 for p in range(first, last + 1))
        return found

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        self.lines.append(len(hidden))
        lines = [np.random.default_rng([int(h[0]), int(h[1])]).standard_normal(VOCAB) * 2 for h in hidden]
        out = np.array(lines, np.float32).reshape(len(hidden), VOCAB)
        out[:, POISON] = -30
        out[hidden[:, 2] > 0, 3] = np.nan
        return out

    def close(self) -> None:
        self.closed = True


class Rig:
    """An executor with a pool of its own, and a block allocator that knows who has what."""

    def __init__(self, blocks: int = 400) -> None:
        self.pool = Pool(PoolShape(blocks, 2, 1, 1, "f32", block=BLOCK))
        for slot in range(2):
            numbers(self.pool, slot)[:] = np.nan
        self.pool._used[:] = True  # as if every block had had an owner before, who left NaN behind
        self.runner = ToyRunner(self.pool)
        layout = KVLayout((KVGroup(None, (0,)), KVGroup(WINDOW, (1,))), slots=2, kv_heads=1, dim=1)
        self.executor = LocalExecutor(self.runner, self.pool, layout, VOCAB)
        self.free = list(range(blocks))
        self.held: dict[int, list[int]] = {}

    def row(self, request: int, start: int, tokens: Sequence[int], want: Want = Want.TOKEN, drafts: int = 0) -> Row:
        """With the blocks it needs on top of those it has."""
        held = self.held.setdefault(request, [])
        need = -(-(start + len(tokens)) // BLOCK) - len(held) // 2
        new = tuple(tuple(self.free.pop(0) for _ in range(need)) for _ in range(2)) if need > 0 else ((), ())
        held += [b for blocks in new for b in blocks]
        return Row(request, start, tuple(tokens), new, want, drafts)

    def release(self, request: int) -> None:
        self.free = self.held.pop(request, []) + self.free

    def step(
        self, *rows: Row, admitted: Sequence[Admission] = (), released: Sequence[int] = ()
    ) -> tuple[RowResult, ...]:
        for request in released:
            self.release(request)
        return self.executor.run(Plan(rows, tuple(admitted), tuple(released))).rows


def admission(request: int, tokens: Sequence[int], prompt: int, eos: Sequence[int] = (), **params: Any) -> Admission:
    return Admission(request, 0, SamplingParams(**(OFF | params)), tuple(tokens), prompt, frozenset(eos))


def generate(rig: Rig, request: int, prompt: list[int], steps: int, **params: Any) -> list[int]:
    """Alone, the prompt at once, one token a step."""
    known = list(prompt)
    for n in range(steps):
        start = len(known) - 1 if n else 0
        new = [admission(request, known, len(prompt), eos=(2,), **params)] if n == 0 else []
        (result,) = rig.step(rig.row(request, start, known[start:]), admitted=new)
        known += result.tokens
    rig.step(released=[request])
    return known


# -- tables and blocks -------------------------------------------------------------------------------------------------


def test_batches_are_contiguous_int32_with_the_rows_one_after_the_other() -> None:
    rig = Rig()
    rig.step(
        rig.row(1, 0, [4, 5, 6, 7, 8], Want.NOTHING),
        rig.row(2, 0, [9], Want.TOKEN),
        rig.row(3, 0, [1, 2, 3], Want.TOKEN, drafts=1),
        admitted=[admission(1, range(4, 12), 8), admission(2, [9], 1), admission(3, [1, 2], 2)],
    )
    batch = rig.runner.batches[-1]
    for array in (batch.tokens, batch.positions, batch.offsets, batch.lengths, batch.wanted, *batch.tables):
        assert array.dtype == np.int32
        assert array.flags.c_contiguous
    assert batch.tokens.tolist() == [4, 5, 6, 7, 8, 9, 1, 2, 3]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 0, 1, 2]
    assert batch.offsets.tolist() == [0, 5, 6, 9]
    assert batch.lengths.tolist() == [5, 1, 3]
    assert batch.wanted.tolist() == [5, 7, 8]
    assert [t.tolist() for t in batch.tables] == [[[0, 1], [4, -1], [6, -1]], [[2, 3], [5, -1], [7, -1]]]
    rig.step(rig.row(2, 1, [9]), rig.row(1, 5, [9, 10, 11]))
    batch = rig.runner.batches[-1]
    assert batch.positions.tolist() == [1, 5, 6, 7]
    assert batch.lengths.tolist() == [2, 8]
    assert batch.wanted.tolist() == [0, 3]
    assert batch.tables[0].tolist() == [[4, -1], [0, 1]]


def test_tables_grow_by_increments_for_many_long_requests() -> None:
    """More requests and more blocks than the tables begin with; the toy's reading checks every entry."""
    rig = Rig(blocks=4000)
    requests = range(40)
    known = {r: [1 + (r + i) % 13 for i in range(3 + r)] for r in requests}
    rig.step(
        *(rig.row(r, 0, known[r], Want.NOTHING) for r in requests),
        admitted=[admission(r, known[r], len(known[r])) for r in requests],
    )
    for length in range(0, 100, 9):
        rows = []
        for r in requests:
            new = [1 + (r + length + i) % 13 for i in range(9)]
            rows.append(rig.row(r, len(known[r]), new, Want.NOTHING))
            known[r] += new
        rig.step(*rows)
    table = rig.runner.batches[-1].tables[0]
    for r in requests:
        mine = -(-len(known[r]) // BLOCK)
        assert (table[r, :mine] >= 0).all()
        assert (table[r, mine:] == -1).all()
    live = table[table >= 0]
    assert len(set(live.tolist())) == len(live)


def test_tables_are_rebuilt_on_readmission() -> None:
    rig = Rig()
    rig.step(rig.row(1, 0, list(range(1, 11)), Want.NOTHING), admitted=[admission(1, range(1, 14), 13)])
    (again,) = rig.step(rig.row(2, 0, [1, 2], Want.NOTHING), admitted=[admission(2, [1, 2, 3], 3)], released=[1])
    assert again == RowResult()
    rig.step(rig.row(1, 0, [1, 2], Want.NOTHING), admitted=[admission(1, range(1, 14), 13)])
    assert rig.runner.batches[-1].tables[0].shape == (1, 1)
    rig.step(rig.row(2, 2, [3, 4, 5], Want.NOTHING), rig.row(1, 2, range(3, 14), Want.TOKEN))
    table = rig.runner.batches[-1].tables[0]
    assert table.shape == (2, 4)
    assert (table[0, 2:] == -1).all()


def test_entries_behind_the_window_become_minus_one() -> None:
    rig = Rig()
    rig.step(rig.row(1, 0, [1] * 3, Want.NOTHING), admitted=[admission(1, [1] * 60, 60)])
    for start in range(3, 50):
        rig.step(rig.row(1, start, [1], Want.NOTHING))
        everything, window = (t[0] for t in rig.runner.batches[-1].tables)
        assert (everything >= 0).all()
        dead = max(0, start - WINDOW + 1) // BLOCK
        assert (window[:dead] == -1).all()
        assert (window[dead:] >= 0).all()


def test_new_blocks_are_zeroed_and_shared_ones_are_not() -> None:
    rig = Rig()
    pool = rig.pool
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    rig.step(rig.row(1, 0, prompt, Want.NOTHING), admitted=[admission(1, prompt, 9)])
    assert [numbers(pool, 0)[2, 0, 0, i, 0] for i in range(BLOCK)] == [10, 0, 0, 0]
    untouched = [b for b in range(400) if b not in rig.held[1]]
    assert np.isnan(numbers(pool, 0)[untouched]).all()
    before = numbers(pool, 0)[[0, 1]].copy()
    blocks = ((0, 1, 20), (3, 4, 21))
    row = Row(2, 8, (9,), blocks, Want.TOKEN, 0, shared=2)
    (result,) = rig.step(row, admitted=[admission(2, prompt, 9)])
    assert (numbers(pool, 0)[[0, 1]] == before).all()
    assert [numbers(pool, 1)[21, 1, 0, i, 0] for i in range(BLOCK)] == [10, 0, 0, 0]
    alone = Rig()
    assert alone.step(alone.row(1, 0, prompt), admitted=[admission(1, prompt, 9)]) == (result,)


def test_blocks_outside_the_window_are_never_touched() -> None:
    rig = Rig()
    prompt = list(range(1, 14))
    rig.step(rig.row(1, 0, prompt[:12], Want.NOTHING), admitted=[admission(1, prompt, 13)])
    row = Row(2, 12, (13,), ((0, 1, 2, 30), (-1, 4, 5, 31)), Want.TOKEN, 0, shared=3)
    last = numbers(rig.pool, 1)[-1].copy()
    rig.step(row, admitted=[admission(2, prompt, 13)])
    assert rig.runner.batches[-1].tables[1].tolist() == [[-1, 4, 5, 31]]
    np.testing.assert_array_equal(numbers(rig.pool, 1)[-1], last)


def test_a_copied_block_begins_as_its_source_does() -> None:
    """The second prompt agrees in six tokens: one block is shared, two tokens of the next are copied in both groups."""
    rig = Rig()
    pool = rig.pool
    prompt, other = [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 9, 9]
    rig.step(rig.row(1, 0, prompt, Want.NOTHING), admitted=[admission(1, prompt, 9)])
    before = [slot[[0, 1, 3, 4]].copy() for slot in pool.slots]
    row = Row(2, 6, (9, 9), ((0, 20), (3, 21)), Want.TOKEN, 0, shared=1, copied=(1, 4))
    (result,) = rig.step(row, admitted=[admission(2, other, 8)])
    for slot, old in zip(pool.slots, before, strict=True):
        assert (slot[[0, 1, 3, 4]] == old).all()
    assert [[numbers(pool, g)[b, v, 0, i, 0] for i in range(BLOCK)] for g, b in ((0, 20), (1, 21)) for v in (0, 1)] == [
        [6, 7, 10, 10]
    ] * 4
    alone = Rig()
    assert alone.step(alone.row(1, 0, other), admitted=[admission(1, other, 8)]) == (result,)


def test_a_copy_may_need_more_new_blocks_which_are_zeroed() -> None:
    rig = Rig()
    prompt, other = [1, 2, 3, 4], [1, 2, 3, 5, 6, 7]
    rig.step(rig.row(1, 0, prompt, Want.NOTHING), admitted=[admission(1, prompt, 4)])
    row = Row(2, 3, (5, 6, 7), ((20, 22), (21, 23)), Want.TOKEN, 0, copied=(0, 1))
    (result,) = rig.step(row, admitted=[admission(2, other, 6)])
    assert [numbers(rig.pool, 0)[22, 0, 0, i, 0] for i in range(BLOCK)] == [7, 8, 0, 0]
    alone = Rig()
    assert alone.step(alone.row(1, 0, other), admitted=[admission(1, other, 6)]) == (result,)


def test_copies_are_made_in_order_and_before_anything_is_zeroed() -> None:
    """A source may be another's new block in the same plan: to copy into, or to begin with zeros; its row may even come
    first where it is zeroed."""
    rig = Rig()
    for request, first in ((1, 1), (2, 5)):
        prompt = list(range(first, first + 4))
        rig.step(rig.row(request, 0, prompt, Want.NOTHING), admitted=[admission(request, prompt, 4)])
    assert (rig.held[1], rig.held[2]) == ([0, 1], [2, 3])
    news = {3: [1, 2, 9], 4: [5, 6, 9], 5: [7, 7]}
    rows = (
        Row(5, 0, (7, 7), ((2,), (3,)), Want.TOKEN),  # takes what the third copies from
        Row(3, 2, (9,), ((20,), (21,)), Want.TOKEN, copied=(0, 1)),
        Row(4, 2, (9,), ((0,), (1,)), Want.TOKEN, copied=(2, 3)),  # into what the second copied from
    )
    results = rig.executor.run(Plan(rows, tuple(admission(r, ids, len(ids)) for r, ids in news.items()), (1, 2))).rows
    for row, result in zip(rows, results, strict=True):
        alone, ids = Rig(), news[row.request]
        assert alone.step(alone.row(1, 0, ids), admitted=[admission(1, ids, len(ids))]) == (result,)


def test_later_rows_bring_shared_and_copied_blocks_too() -> None:
    """One that has computed a block itself takes over the next, and the beginning of the one after it."""
    rig = Rig()
    prompt, other = list(range(1, 13)), [*range(1, 11), 1, 1]
    rig.step(rig.row(1, 0, prompt, Want.NOTHING), admitted=[admission(1, prompt, 12)])
    assert rig.held[1] == [0, 1, 2, 3, 4, 5]
    rig.step(rig.row(2, 0, other[:4], Want.NOTHING), admitted=[admission(2, other, 12)])
    row = Row(2, 10, (1, 1), ((1, 20), (4, 21)), Want.TOKEN, 0, shared=1, copied=(2, 5))
    (result,) = rig.step(row)
    own = rig.held[2]
    assert [t.tolist() for t in rig.runner.batches[-1].tables] == [[[own[0], 1, 20]], [[-1, 4, 21]]]
    alone = Rig()
    assert alone.step(alone.row(1, 0, other), admitted=[admission(1, other, 12)]) == (result,)
    (after,) = rig.step(Row(2, 12, result.tokens, ((22,), (23,)), Want.TOKEN))
    (plain,) = alone.step(alone.row(1, 12, result.tokens))
    assert after == plain


@pytest.mark.parametrize("blocks", [((), ()), ((20,), (21,))])
@pytest.mark.parametrize("copied", [(0, 1), (0,)])
def test_a_copy_without_a_new_block_is_refused(blocks: tuple[tuple[int, ...], ...], copied: tuple[int, ...]) -> None:
    rig = Rig()
    rig.step(rig.row(1, 0, [1, 2], Want.NOTHING), admitted=[admission(1, range(1, 9), 8)])
    shared = len(blocks[0]) if len(copied) == 2 else 0
    row = Row(1, 2, (3,), blocks, Want.TOKEN, shared=shared, copied=copied)
    with pytest.raises(ValueError, match="request 1: a row must bring a new block in every KV group"):
        rig.step(row)


class BlankRunner:
    """Computes nothing."""

    def run(self, batch: Batch) -> np.ndarray:
        return np.zeros((len(batch.wanted), 1), np.float32)

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        return np.zeros((len(hidden), VOCAB), np.float32)

    def close(self) -> None:
        pass


def test_a_new_block_may_be_outside_the_window_at_once() -> None:
    pool = Pool(PoolShape(8, 1, 1, 1, "f32", block=BLOCK))
    layout = KVLayout((KVGroup(None, (0,)), KVGroup(WINDOW, (1,))), slots=1, kv_heads=1, dim=1)
    executor = LocalExecutor(BlankRunner(), pool, layout, VOCAB)
    pool.clear(range(8))
    numbers(pool, 0)[:] = 5
    row = Row(1, 0, (1,) * 14, ((0, 1, 2, 3), (-1, -1, 4, 5)), Want.TOKEN)
    assert executor.run(Plan((row,), (admission(1, [1] * 14, 14),))).rows == (RowResult((0,)),)
    assert [bool(numbers(pool, 0)[b].any()) for b in range(8)] == [False] * 6 + [True] * 2


def test_tables_do_not_grow_with_the_number_of_requests_ever_served() -> None:
    pool = Pool(PoolShape(8, 1, 1, 1, "f32", block=BLOCK))
    layout = KVLayout((KVGroup(None, (0,)),), slots=1, kv_heads=1, dim=1)
    executor = LocalExecutor(BlankRunner(), pool, layout, VOCAB)
    sizes = set()
    for n in range(200):
        executor.run(Plan((Row(n, 0, (1,), ((0,),), Want.TOKEN),), (admission(n, [1], 1),), (n - 1,)))
        sizes.add(executor._tables.arrays[0].shape)
    assert len(sizes) == 1


# -- the same answer however it was computed ---------------------------------------------------------------------------

sampled: dict[str, Any] = {"temperature": 1.0, "seed": 42}
WAYS: list[dict[str, Any]] = [
    {},
    sampled,
    sampled | {"top_k": 4, "top_p": 0.8},
    sampled | {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "min_tokens": 5},
    {"presence_penalty": 1.5, "logit_bias": {4: 3.0}, "min_tokens": 9},
]


@given(st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_chunks_drafts_neighbours_and_preemptions_change_nothing(seed: int) -> None:
    """One request under a random schedule, against itself alone, its prompt in one chunk, one token a step."""
    rng = random.Random(seed)
    prompt, params = [rng.randint(1, 14) for _ in range(rng.randint(1, 10))], rng.choice(WAYS)
    want = generate(Rig(), 0, prompt, 12, **params)
    rig, known, start, admitted = Rig(), list(prompt), 0, False
    neighbour, at = [3] * 40, 0
    while len(known) < len(want):
        released = [1] if admitted and rng.random() < 0.2 else []
        for request in released:
            rig.release(request)
            admitted, start = False, 0
        new = [] if admitted else [admission(1, known, len(prompt), eos=(2,), **params)]
        admitted = True
        tokens = known[start : start + rng.randint(1, len(known) - start)]
        drafts: list[int] = []
        if start + len(tokens) == len(known):
            drafts = want[len(known) : len(known) + rng.randint(0, 3)]
            drafts = drafts + [rng.randint(1, 14) for _ in range(rng.randint(0, 2))]
        ends = start + len(tokens) == len(known)
        rows = [rig.row(1, start, tokens + drafts, Want.TOKEN if ends else Want.NOTHING, len(drafts))]
        if rng.random() < 0.5 and at < 40:
            if at == 0:
                new.append(admission(9, neighbour, 40))
            rows.insert(rng.randint(0, 1), rig.row(9, at, neighbour[at : at + 5], Want.NOTHING))
            at += 5
        results = rig.executor.run(Plan(tuple(rows), tuple(new), tuple(released))).rows
        result = next(r for row, r in zip(rows, results, strict=True) if row.request == 1)
        assert len(result.tokens) == (len(drafts) + 1 if ends else 0)
        start += len(tokens)
        for draft, token in zip([*drafts, None], result.tokens, strict=False):
            known.append(token)
            if draft != token:
                break
            start += 1
    assert known[: len(want)] == want


def test_p1_alone_in_a_crowd_and_at_every_place() -> None:
    def run(place: int, crowd: int) -> tuple[int, ...]:
        rig = Rig(1000)
        requests = [100 + i for i in range(crowd)]
        requests.insert(place, 1)
        known = {r: [5, 6, 7] if r == 1 else [1 + r % 13] for r in requests}
        found = []
        for n in range(16):
            rows = [rig.row(r, len(known[r]) - 1 if n else 0, known[r][-1:] if n else known[r]) for r in requests]
            new = [admission(r, known[r], len(known[r]), temperature=0.8, seed=42 if r % 2 else r) for r in requests]
            results = rig.step(*rows, admitted=new if n == 0 else ())
            for r, result in zip(requests, results, strict=True):
                known[r] += result.tokens
            found.append(known[1][-1])
        return tuple(found)

    alone = run(0, 0)
    assert len(set(alone)) > 4
    assert all(run(place, 7) == alone for place in range(8))


# -- prompt log-probabilities ------------------------------------------------------------------------------------------


def cuts(length: int) -> Iterator[list[int]]:
    """Every way to cut a prompt into chunks, as the chunks' ends."""
    for mask in range(1 << (length - 1)):
        yield [i + 1 for i in range(length - 1) if mask >> i & 1] + [length]


def test_prompt_logprobs_are_the_same_for_every_chunking() -> None:
    prompt, k = [3, 1, 4, 1, 5, 9, 2], 3
    params = {"prompt_logprobs": k, "temperature": 0.5, "repetition_penalty": 1.7}
    rig = Rig()
    (whole,) = rig.step(rig.row(0, 0, prompt, Want.BOTH), admitted=[admission(0, prompt, 7, **params)])
    assert len(whole.tokens) == 1
    assert len(whole.prompt_logprobs) == 7
    assert whole.prompt_logprobs[0] is None
    for position in range(1, 7):
        found = whole.prompt_logprobs[position]
        assert found is not None
        assert found.token == prompt[position]
        assert len(found.top) == k
        crc = zlib.crc32(bytes(t + 1 for t in prompt[:position]))
        row = np.random.default_rng([crc >> 16, crc & 0xFFFF]).standard_normal(VOCAB) * 2
        row[POISON] = -30
        assert found.logprob == pytest.approx(row[found.token] - np.log(np.exp(row).sum()), abs=1e-5)
        assert found.rank == 1 + int((row > row[found.token]).sum())
    for request, ends in enumerate(cuts(7), 1):
        got: list[TokenLogprob | None] = []
        start = 0
        for end in ends:
            new = [admission(request, prompt, 7, **params)] if start == 0 else []
            want = Want.BOTH if end == 7 else Want.PROMPT
            (result,) = rig.step(rig.row(request, start, prompt[start:end], want), admitted=new)
            assert len(result.prompt_logprobs) == end - start
            got += result.prompt_logprobs
            start = end
        assert tuple(got) == whole.prompt_logprobs
        assert result.tokens == whole.tokens
        rig.step(released=[request])


def test_prompt_logprobs_go_on_after_chunks_that_did_not_want_them() -> None:
    """After a preemption the first chunks may be recomputed without asking again; an answer has None."""
    prompt = [3, 1, 4, 1, 5, 9]
    rig = Rig()
    params = {"prompt_logprobs": 0}
    (whole,) = rig.step(rig.row(0, 0, prompt, Want.BOTH), admitted=[admission(0, prompt, 6, **params)])
    known = [*prompt, *whole.tokens]
    rig.step(rig.row(1, 0, known[:3], Want.NOTHING), admitted=[admission(1, known, 6, **params)])
    assert rig.runner.batches[-1].wanted.tolist() == [2]  # just what the next row will need
    (rest,) = rig.step(rig.row(1, 3, known[3:], Want.BOTH))
    assert rest.prompt_logprobs == (*whole.prompt_logprobs[3:], None)
    (after,) = rig.step(rig.row(1, 7, [8, 9, 3], Want.BOTH, drafts=2))
    assert after.prompt_logprobs == (None, None, None)
    assert len(after.tokens) == 3


def test_a_prompt_of_one_token_and_no_answer() -> None:
    rig = Rig()
    a = admission(1, [5], 1, prompt_logprobs=2, max_tokens=0)
    assert rig.step(rig.row(1, 0, [5], Want.PROMPT), admitted=[a]) == (RowResult(prompt_logprobs=(None,)),)


def test_prompt_logprobs_whose_start_was_never_computed_are_an_error_not_a_guess() -> None:
    rig = Rig()
    prompt = list(range(1, 10))
    rig.step(rig.row(1, 0, prompt, Want.NOTHING), admitted=[admission(1, prompt, 9)])
    row = Row(2, 8, (9,), ((0, 1, 20), (3, 4, 21)), Want.PROMPT, 0, shared=2)
    (result,) = rig.step(row, admitted=[admission(2, prompt, 9, prompt_logprobs=0)])
    assert result.error is not None
    assert "prompt token 8" in result.error


def test_logits_come_in_slices_of_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [1 + i % 13 for i in range(40)]

    def run() -> tuple[tuple[RowResult, ...], list[int]]:
        rig = Rig()
        rows = [rig.row(1, 0, prompt, Want.BOTH), rig.row(2, 0, [3, 4, 5, 6], Want.TOKEN, drafts=2)]
        new = [admission(1, prompt, 40, prompt_logprobs=1), admission(2, [3, 4], 2, temperature=1.0, logprobs=1)]
        return rig.step(*rows, admitted=new), rig.runner.lines

    whole, lines = run()
    assert lines == [43]
    for most, expected in ((7, [7] * 6 + [1]), (1, [1] * 43)):
        monkeypatch.setattr(local, "LOGITS_BYTES", most * VOCAB * 4 + 3)
        assert run() == (whole, expected)
    monkeypatch.setattr(local, "LOGITS_BYTES", 1)
    assert run() == (whole, [1] * 43)


# -- errors ------------------------------------------------------------------------------------------------------------


def test_an_error_is_one_row_s_alone() -> None:
    rig = Rig()
    prompts = {1: [5, 6], 2: [5, POISON], 3: [7, 8, 9], 4: [POISON, 4, 4]}
    new = [admission(r, p, len(p), temperature=1.0, prompt_logprobs=1) for r, p in prompts.items()]
    results = rig.step(*(rig.row(r, 0, p, Want.BOTH) for r, p in prompts.items()), admitted=new)
    assert [r.error for r in results] == [None, NOT_FINITE, None, NOT_FINITE]
    assert results[1] == results[3] == RowResult(error=NOT_FINITE)
    for i, request in ((0, 1), (2, 3)):
        alone = Rig()
        a = admission(request, prompts[request], len(prompts[request]), temperature=1.0, prompt_logprobs=1)
        assert alone.step(alone.row(request, 0, prompts[request], Want.BOTH), admitted=[a]) == (results[i],)
    (after,) = rig.step(rig.row(1, 2, results[0].tokens), released=[2, 4])
    assert after.error is None


def test_blocks_of_a_broken_request_are_clean_for_the_next() -> None:
    rig = Rig()
    rig.step(rig.row(1, 0, [POISON] * 9), admitted=[admission(1, [POISON] * 9, 9)])
    numbers(rig.pool, 0)[rig.held[1]] = np.nan
    rig.release(1)
    row = rig.row(2, 0, [4])
    rig.executor.run(Plan((row,), (admission(2, [4], 1),), (1,)))
    assert not np.isnan(numbers(rig.pool, 0)[row.blocks[0][0]]).any()


def test_an_error_behind_a_rejected_draft_is_no_error() -> None:
    rig = Rig()
    (first,) = rig.step(rig.row(1, 0, [5, 6, 7]), admitted=[admission(1, [5, 6, 7], 3, logprobs=1)])
    (token,) = first.tokens
    assert token != POISON
    (drafted,) = rig.step(rig.row(1, 3, [token, POISON, 3], Want.TOKEN, drafts=2))
    alone = Rig()
    alone.step(alone.row(1, 0, [5, 6, 7]), admitted=[admission(1, [5, 6, 7], 3, logprobs=1)])
    (plain,) = alone.step(alone.row(1, 3, [token]))
    assert drafted.error is None
    assert drafted.tokens == plain.tokens * 3
    assert drafted.logprobs == plain.logprobs * 3


def test_an_error_behind_an_accepted_draft_is_one() -> None:
    rig = Rig()
    a = admission(1, [5, 6, 7], 3, logit_bias={POISON: 100.0})
    (result,) = rig.step(rig.row(1, 0, [5, 6, 7, POISON], Want.TOKEN, drafts=1), admitted=[a])
    assert result == RowResult(error=NOT_FINITE)


def test_a_plan_that_lost_count_is_refused() -> None:
    rig = Rig()
    rig.step(rig.row(1, 0, [1, 2]), admitted=[admission(1, [1, 2], 2)])
    with pytest.raises(ValueError, match="request 7 has a row but was not admitted"):
        rig.step(rig.row(7, 0, [1]))
    with pytest.raises(ValueError, match="request 1 is admitted twice"):
        rig.step(admitted=[admission(1, [1], 1)])
    with pytest.raises(ValueError, match="1 tokens at 4 does not fit 1 blocks of 4"):
        rig.step(Row(1, 4, (1,), ((), ()), Want.TOKEN))
    with pytest.raises(ValueError, match="0 tokens"):
        rig.step(Row(1, 2, (), ((), ()), Want.TOKEN))
    with pytest.raises(ValueError, match="equally many blocks"):
        rig.step(Row(1, 2, (1,), ((9,), ()), Want.TOKEN))
    with pytest.raises(ValueError, match="only 2 tokens are known"):
        rig.step(Row(1, 3, (1,), ((), ()), Want.TOKEN))


def test_nothing_to_do_and_the_end() -> None:
    rig = Rig()
    assert rig.step(released=[5]) == ()
    assert rig.runner.batches == []
    rig.executor.close()
    assert rig.runner.closed


def test_vocabularies_beyond_the_sampler_are_refused() -> None:
    rig = Rig()
    layout = KVLayout((KVGroup(None, (0,)),), slots=1, kv_heads=1, dim=1)
    with pytest.raises(ValueError, match="524287"):
        LocalExecutor(rig.runner, rig.pool, layout, 1 << 19)
