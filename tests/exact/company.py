"""Requests on a native runner without engine or sampler: they come, are cut into chunks, are preempted and go as a
test likes, and every logit they ask for is kept."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.cache.blocks import Blocks
from headrace.cache.pool import BLOCK, Pool, PoolShape
from headrace.program.backend import Batch
from headrace.program.decoder import write_program
from headrace.program.native_backend import NativeBackend
from tests.models.running import Model


@dataclass(frozen=True)
class Row:
    """Some tokens of one request, from position `start` on."""

    request: int
    start: int
    tokens: Sequence[int]
    wanted: Collection[int] | None = None
    """Positions whose logits are kept; None: of all."""


Key = tuple[int, int]
"""(request, position)."""


class Company:
    """A model loaded once, its pool, and who holds which of its blocks. Blocks lie scattered."""

    def __init__(
        self,
        model: Model,
        kv_format: str = "bf16",
        *,
        isa: str | None = None,
        threads: int = 2,
        fuse: bool = True,
        tokens: int = 2000,
    ) -> None:
        """`tokens` that the pool has room for, all requests together."""
        program = write_program(model.spec, model.weights, model.spec.context)
        kv = program.kv
        count = (-(-tokens // BLOCK) + 40) * len(kv.groups)
        self._pool = Pool(PoolShape(count, kv.slots, kv.kv_heads, kv.dim, kv_format))
        self.windows = [group.window for group in kv.groups]
        self._blocks = Blocks(count, self.windows)
        self._ids = np.random.default_rng(count).permutation(count).astype(np.int32)
        self._runner = NativeBackend(isa, fuse=fuse).load(program, model.weights, self._pool, threads)
        self._known: set[int] = set()

    def step(self, rows: Sequence[Row]) -> dict[Key, np.ndarray]:
        """One batch; the logits asked for."""
        for row in rows:
            if row.request not in self._known:
                self._known.add(row.request)
                self._blocks.open(row.request)
            self._blocks.trim(row.request, row.start)
            had = self._blocks.length(row.request)
            self._blocks.grow(row.request, row.start + len(row.tokens))
            new = self._blocks.table(row.request, had)
            self._pool.clear(self._ids[[b for ids in new for b in ids]].tolist())
        counts = [len(row.tokens) for row in rows]
        positions = np.concatenate([np.arange(row.start, row.start + len(row.tokens)) for row in rows])
        owners = np.repeat([row.request for row in rows], counts)
        asked = {row.request: row.wanted for row in rows}
        keys = [(int(o), int(p)) for o, p in zip(owners, positions, strict=True)]
        wanted = [i for i, (o, p) in enumerate(keys) if asked[o] is None or p in asked[o]]  # type: ignore[operator]
        batch = Batch(
            tokens=np.concatenate([row.tokens for row in rows]).astype(np.int32),
            positions=positions.astype(np.int32),
            offsets=np.cumsum([0, *counts]).astype(np.int32),
            lengths=np.array([row.start + len(row.tokens) for row in rows], np.int32),
            tables=self._tables(rows),
            wanted=np.array(wanted, np.int32),
        )
        hidden = self._runner.run(batch)
        logits = self._runner.logits(hidden).copy() if wanted else hidden
        return {keys[i]: line for i, line in zip(wanted, logits, strict=True)}

    def _tables(self, rows: Sequence[Row]) -> tuple[np.ndarray, ...]:
        tables = [self._blocks.table(row.request) for row in rows]
        most = max(len(table[0]) for table in tables)
        out = np.full((len(tables[0]), len(rows), most), -1, np.int32)
        for r, table in enumerate(tables):
            for g, ids in enumerate(table):
                own = np.array(ids)
                out[g, r, : len(ids)] = np.where(own < 0, -1, self._ids[own])
        return tuple(out)

    def release(self, request: int) -> None:
        """The request goes, or is preempted: its blocks are somebody else's from now on."""
        self._blocks.release(request)
        self._known.remove(request)

    def alone(
        self, tokens: Sequence[int], chunks: Sequence[int] = (), wanted: Collection[int] | None = None
    ) -> dict[int, np.ndarray]:
        """By position the logits of one request, cut into chunks of the sizes given, the last one of what is left."""
        out: dict[int, np.ndarray] = {}
        start = 0
        for size in (*chunks, len(tokens)):
            part = tokens[start : start + size]
            if part:
                out |= {p: line for (_, p), line in self.step([Row(-1, start, part, wanted)]).items()}
            start += len(part)
        self.release(-1)
        return out

    def together(
        self,
        prompts: Sequence[Sequence[int]],
        rng: np.random.Generator,
        *,
        rows: int,
        wanted: Collection[int] | None = None,
    ) -> Iterator[tuple[Key, np.ndarray]]:
        """All prompts, at most `rows` in a step, some again after a preemption: who is in which step with how many
        tokens is drawn anew every time."""
        done = [0] * len(prompts)
        waiting, live = list(rng.permutation(len(prompts))), list[int]()
        preempted = set[int]()
        while waiting or live:
            while waiting and len(live) < rows and (not live or rng.random() < 0.7):
                live.append(int(waiting.pop()))
            for request in live:
                if done[request] > 3 and request not in preempted and rng.random() < 0.06:
                    preempted.add(request)
                    self.release(request)
                    done[request] = 0
            some = [r for r in rng.permutation(live).tolist() if rng.random() < 0.8] or live[:1]
            step = []
            for request in some:
                size = int(rng.choice([1, 1, 2, 5, 16, 33, 512]))
                step.append(Row(request, done[request], prompts[request][done[request] :][:size], wanted))
                done[request] += len(step[-1].tokens)
            yield from self.step(step).items()
            for request in [r for r in live if done[r] == len(prompts[r])]:
                live.remove(request)
                self.release(request)


def same(got: np.ndarray, want: np.ndarray) -> bool:
    """Finite, and bit for bit the same."""
    assert got.dtype == want.dtype == np.float32 and got.shape == want.shape
    return got.tobytes() == want.tobytes() and bool(np.isfinite(got).all())
