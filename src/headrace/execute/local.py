"""The executor of this process: runs a program's rows on one runner, then the sampler.

Owns, by request, the block tables, the sampling state and what a prompt's log-probabilities and embeddings carry from
one chunk to the next; between steps nothing else is kept. Knows nothing of scheduling: rows come as increments and are
taken as given; a row that breaks the contract of `execute.plan` is a `ValueError`, because whoever wrote the plan has
lost count.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.cache.pool import Pool
from headrace.execute.moving import Blobs, Mover
from headrace.execute.plan import Admission, Mask, Masks, Plan, Result, Row, RowResult, TokenLogprob, Want
from headrace.execute.pooling import Pooled
from headrace.execute.sampler import Answer, Ask, Draw, SamplingState, Score, reduce
from headrace.ops import sampling
from headrace.ops.sampling import MAX_VOCAB, Sampling
from headrace.program.backend import Batch, Runner
from headrace.program.program import KVLayout

LOGITS_BYTES = 32 << 20
"""Most bytes of logits that exist at once (one line at least)."""


def logits_at_once(vocab: int) -> int:
    """Lines of logits that are made at a time."""
    return max(1, LOGITS_BYTES // (4 * vocab))


class _Live:
    """One request's state."""

    __slots__ = ("ahead", "blocks", "dead", "left_out", "line", "pooled", "prompt", "sampling")

    def __init__(self, line: int, admission: Admission, vocab: int, groups: int) -> None:
        self.line = line
        """Its line in every group's table."""
        self.prompt = admission.tokens[: admission.prompt]
        self.left_out = admission.left_out
        self.sampling = SamplingState(admission, vocab)
        self.blocks = 0
        """Entries of each of its tables."""
        self.dead = [0] * groups
        """Per group: how many of the first entries have left the window for good."""
        pooling = admission.params.pooling
        self.pooled = None if pooling is None else Pooled(pooling)
        self.ahead: tuple[int, TokenLogprob] | None = None
        """The log-probability of this token of the prompt, computed by the row before that token's."""


class _Tables:
    """Block tables of all live requests, int32 [lines, entries] per group; -1 where there is no block.

    Lines are handed out and taken back; the arrays grow as needed.
    """

    def __init__(self, groups: int) -> None:
        self.arrays = [np.full((16, 16), -1, np.int32) for _ in range(groups)]
        self._free = list(range(15, -1, -1))

    def take(self) -> int:
        """An empty line."""
        if not self._free:
            lines = len(self.arrays[0])
            self._pad(lines, 0)
            self._free = list(range(2 * lines - 1, lines - 1, -1))
        return self._free.pop()

    def give(self, line: int) -> None:
        """The line is empty again."""
        for array in self.arrays:
            array[line] = -1
        self._free.append(line)

    def append(self, line: int, at: int, blocks: Sequence[tuple[int, ...]]) -> None:
        """Per group the ids of the entries from `at` on; all groups get equally many."""
        end = at + len(blocks[0])
        while end > self.arrays[0].shape[1]:
            self._pad(0, self.arrays[0].shape[1])
        for array, new in zip(self.arrays, blocks, strict=True):
            array[line, at:end] = new

    def _pad(self, lines: int, entries: int) -> None:
        self.arrays = [np.pad(array, ((0, lines), (0, entries)), constant_values=-1) for array in self.arrays]


class LocalExecutor:
    """`execute.plan.Executor` over one `Runner`.

    Prompt log-probabilities: a row that wants `PROMPT` gets exactly one entry for each of its tokens, each given all
    tokens before it. None stands for the first token of the prompt, and for tokens that are no prompt (an answer that
    is recomputed after a preemption, drafts). The first entry of a chunk comes from the last hidden state of the row
    before; it is kept for every request that asks for `prompt_logprobs`, whatever its rows want. They are always those
    of the model's own logits.

    Embeddings: a request with `pooling` asks for no logits; its rows' hidden states go to its `pooling.Pooled`.

    A row whose logits are not finite gets an `error`, its neighbours their results.
    """

    def __init__(
        self,
        runner: Runner,
        pool: Pool,
        layout: KVLayout,
        vocab: int,
        arithmetic: Sampling = sampling,
        tier: Blobs | None = None,
    ) -> None:
        """`vocab` is the width of the logits; `arithmetic` chooses tokens; plans' moves go to `tier`, and come from
        there."""
        if not 0 < vocab <= MAX_VOCAB:
            raise ValueError(f"the sampler handles logits of 1 to {MAX_VOCAB} tokens, not {vocab}")
        self._runner = runner
        self._pool = pool
        self._vocab = vocab
        self._arithmetic = arithmetic
        self._block = pool.shape.block
        self._groups = len(layout.groups)
        self._windows = [(g, group.window) for g, group in enumerate(layout.groups) if group.window is not None]
        self._tables = _Tables(self._groups)
        self._mover = Mover(pool, tier)
        self._live: dict[int, _Live] = {}

    def run(self, plan: Plan, masks: Masks | None = None) -> Result:
        """Results row for row. ValueError for a plan that contradicts what went before; ids of `released` that this
        executor never saw are fine (the request may have been dropped before it ran).
        """
        for request in plan.released:
            self._release(request)
        for admission in plan.admitted:
            self._admit(admission)
        for move in plan.moves:
            self._mover.begin(move)
        if not plan.rows:
            return Result(moved=self._mover.over(wait=plan.waits))
        lives = [self._take(row) for row in plan.rows]
        self._prepare(plan.rows)
        wanted: list[int] = []
        asks: list[Ask] = []
        firsts: list[int] = []
        pooled: dict[int, range] = {}
        offset = 0
        for r, (row, live) in enumerate(zip(plan.rows, lives, strict=True)):
            firsts.append(len(asks))
            if live.pooled is None:
                _ask(row, live, offset, wanted, asks)
            else:
                reads = live.pooled.reads(row)
                pooled[r] = range(len(wanted), len(wanted) + len(reads))
                wanted.extend(range(offset + reads.start, offset + reads.stop))
            offset += len(row.tokens)
        firsts.append(len(asks))
        hidden = self._runner.run(self._batch(plan.rows, lives, wanted))
        given = {} if masks is None else masks()
        for r, row in enumerate(plan.rows):
            if mask := given.get(row.request):
                _restrict(asks, firsts[r + 1], mask)
        vectors = {r: _pool(plan.rows[r], lives[r], hidden[at.start : at.stop]) for r, at in pooled.items()}
        if pooled:
            hidden = np.delete(hidden, [line for at in pooled.values() for line in at], axis=0)
        answers = self._answers(hidden, asks)
        results = tuple(
            vectors[r]
            if r in vectors
            else _result(row, live, answers[firsts[r] : firsts[r + 1]], given.get(row.request))
            for r, (row, live) in enumerate(zip(plan.rows, lives, strict=True))
        )
        return Result(results, self._mover.over(wait=False))

    def close(self) -> None:
        """Gives memory and threads back; no run afterwards."""
        self._live.clear()
        self._mover.close()
        self._runner.close()

    # -- state -----------------------------------------------------------------------------------------------------

    def _prepare(self, rows: Sequence[Row]) -> None:
        """New blocks hold what their rows begin with: copies, or zeros."""
        fresh: list[int] = []
        for row in rows:
            if row.copied:
                for source, blocks in zip(row.copied, row.blocks, strict=True):
                    self._pool.copy(source, blocks[row.shared])
            for blocks in row.blocks:
                fresh += [b for b in blocks[row.shared + bool(row.copied) :] if b >= 0]
        self._pool.clear(fresh)

    def _admit(self, admission: Admission) -> None:
        if admission.request in self._live:
            raise ValueError(f"request {admission.request} is admitted twice")
        self._live[admission.request] = _Live(self._tables.take(), admission, self._vocab, self._groups)

    def _release(self, request: int) -> None:
        if live := self._live.pop(request, None):
            self._tables.give(live.line)

    def _take(self, row: Row) -> _Live:
        """Brings the request's tables and sampling state up to this row."""
        live = self._live.get(row.request)
        if live is None:
            raise ValueError(f"request {row.request} has a row but was not admitted")
        if row.blocks and row.blocks[0]:
            if len(row.blocks) != self._groups or len({len(blocks) for blocks in row.blocks}) > 1:
                raise ValueError(f"request {row.request}: a row must bring equally many blocks for all KV groups")
            self._tables.append(live.line, live.blocks, row.blocks)
            live.blocks += len(row.blocks[0])
        if row.copied and not (len(row.copied) == len(row.blocks) and row.shared < len(row.blocks[0])):
            raise ValueError(
                f"request {row.request}: a row must bring a new block in every KV group for what is copied"
            )
        end = row.start + len(row.tokens)
        if not row.tokens or end > live.blocks * self._block:
            raise ValueError(
                f"request {row.request}: a row of {len(row.tokens)} tokens at {row.start} does not fit "
                f"{live.blocks} blocks of {self._block}"
            )
        for group, window in self._windows:
            # The row's first token sees itself and the window - 1 tokens before it; later rows see no further back.
            dead = (row.start - window + 1) // self._block
            if dead > live.dead[group]:
                self._tables.arrays[group][live.line, live.dead[group] : dead] = -1
                live.dead[group] = dead
        start = live.left_out + row.start
        if row.drafts:
            live.sampling.advance(start, row.tokens[: -row.drafts], row.tokens[-row.drafts :])
        else:
            live.sampling.advance(start, row.tokens, ())
        return live

    # -- the step --------------------------------------------------------------------------------------------------

    def _batch(self, rows: Sequence[Row], lives: Sequence[_Live], wanted: list[int]) -> Batch:
        lengths = np.array([len(row.tokens) for row in rows], np.int32)
        starts = np.array([row.start for row in rows], np.int32)
        offsets = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        tokens = np.array([token for row in rows for token in row.tokens], np.int32)
        if len(tokens) == len(rows):
            positions = starts
        else:
            positions = np.repeat(starts - offsets[:-1], lengths) + np.arange(len(tokens), dtype=np.int32)
        ends = starts + lengths
        entries = -(-int(ends.max()) // self._block)
        lines = [live.line for live in lives]
        tables = tuple(np.ascontiguousarray(array[lines, :entries]) for array in self._tables.arrays)
        return Batch(tokens, positions, offsets, ends, tables, np.array(wanted, np.int32))

    def _answers(self, hidden: np.ndarray, asks: list[Ask]) -> list[Answer]:
        """Logits and what is asked of them, a bounded number of lines at a time."""
        most = logits_at_once(self._vocab)
        answers: list[Answer] = []
        for first in range(0, len(asks), most):
            logits = self._runner.logits(hidden[first : first + most])
            answers += reduce(logits, asks[first : first + most], self._arithmetic)
        return answers


def _pool(row: Row, live: _Live, hidden: np.ndarray) -> RowResult:
    assert live.pooled is not None
    return live.pooled.add(row, hidden)


def _ask(row: Row, live: _Live, offset: int, wanted: list[int], asks: list[Ask]) -> None:
    """Appends the row's lines: which tokens of the step (its own begin at `offset`), and what is asked of each.

    Scores of the prompt's next tokens come first, then draws; both never ask the same line.
    """
    start, end = live.left_out + row.start, len(row.tokens)
    prompt, tops = live.prompt, live.sampling.prompt_logprobs
    if (row.want & Want.PROMPT or tops is not None) and start + 1 < len(prompt):
        first = 0 if row.want & Want.PROMPT else end - 1
        following = prompt[start + first + 1 : start + end + 1]
        wanted.extend(range(offset + first, offset + first + len(following)))
        asks.extend([Score(token, tops or 0) for token in following])
    if row.want & Want.TOKEN:
        wanted.extend(range(offset + end - 1 - row.drafts, offset + end))
        asks.extend([Draw(live.sampling, ahead) for ahead in range(row.drafts + 1)])


def _restrict(asks: list[Ask], end: int, mask: Mask) -> None:
    """Gives a row's draws, the last asks before `end`, their lines of its mask."""
    for i, line in enumerate(mask.lines, end - len(mask.lines)):
        ask = asks[i]
        assert isinstance(ask, Draw), "a row has a line of its mask for each of its draws"
        asks[i] = ask._replace(allowed=line)


def _result(row: Row, live: _Live, answers: list[Answer], mask: Mask | None) -> RowResult:
    """A row's answers put together; keeps what the next row needs of them."""
    if mask is not None and mask.error is not None:
        return RowResult(error=mask.error)
    if row.want == Want.TOKEN and len(answers) == 1 and answers[0].logprob is None and answers[0].token is not None:
        return RowResult((answers[0].token,))
    draws = row.drafts + 1 if row.want & Want.TOKEN else 0
    scores, drawn = answers[: len(answers) - draws], answers[len(answers) - draws :]
    if error := next((answer.error for answer in scores if answer.error), None):
        return RowResult(error=error)
    prompt_logprobs: list[TokenLogprob | None] = []
    start = live.left_out + row.start
    if row.want & Want.PROMPT:
        carried = live.ahead[1] if live.ahead and live.ahead[0] == start else None
        if carried is None and row.start and start < len(live.prompt):
            return RowResult(error=f"the log-probability of prompt token {start} needs the row before it")
        prompt_logprobs = [carried, *(answer.logprob for answer in scores), *[None] * len(row.tokens)]
    end = start + len(row.tokens)
    if scores and scores[-1].logprob and end < len(live.prompt):
        live.ahead = end, scores[-1].logprob
    tokens, logprobs, error = _drawn(drawn, row.tokens[len(row.tokens) - row.drafts :])
    if error:
        return RowResult(error=error)
    return RowResult(tokens, logprobs, tuple(prompt_logprobs[: len(row.tokens)]))


def _drawn(
    answers: list[Answer], drafts: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...], str | None]:
    """Tokens, log-probabilities and the error of a row's draws.

    An error behind a draft that is not accepted would not have come up without drafts: it is none. What stands in its
    place, and behind it, is never read: the last good token again.
    """
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    accepted = True
    for answer, draft in zip(answers, (*drafts, None), strict=False):
        if answer.token is None:
            if accepted:
                return (), (), answer.error
            tokens.append(tokens[-1])
            logprobs += logprobs[-1:]
            continue
        tokens.append(answer.token)
        if answer.logprob:
            logprobs.append(answer.logprob)
        accepted = accepted and answer.token == draft
    return tuple(tokens), tuple(logprobs), None
