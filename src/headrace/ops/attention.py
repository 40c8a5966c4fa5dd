"""Keys and values into the pool, and attention over the pool. The pool is the only place attention reads them from.

Blocks hold 32 tokens of consecutive absolute positions and are found through block tables; `KVIndex` is what follows
from one plan's rows and one group's tables, worked out once and used by every layer of the group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.formats.kv import KV_FORMATS
from headrace.ops import signatures
from headrace.ops.kv import Stored, encode
from headrace.ops.op import Case, KVCase, Op

WORKSPACE = 1 << 24
"""Numbers that one tile's keys, values and scores may take together, where one row alone does not take more."""


@dataclass(frozen=True, eq=False)
class Tile:
    """Rows that are computed together: several of one token each, or some tokens of one row."""

    tokens: Tensor
    """int64 [rows, queries] indices into the step's tokens."""
    blocks: Tensor
    """int64 [rows × blocks] of the pool, in order of positions."""
    masked: Tensor
    """bool [rows, 1, queries, blocks × block]: not seen. A row shorter than its tile repeats a block of its own,
    masked: it reads no other row's memory."""


@dataclass(frozen=True, eq=False)
class KVIndex:
    """Where the rows of a step find their keys and values, for one group of layers."""

    blocks: Tensor
    """int64 [tokens]: in which block each token is stored."""
    places: Tensor
    """int64 [tokens]: and where in it."""
    tiles: tuple[Tile, ...]

    @classmethod
    def of(
        cls,
        positions: np.ndarray,
        offsets: np.ndarray,
        lengths: np.ndarray,
        table: np.ndarray,
        *,
        window: int | None,
        heads: int,
        kv_heads: int,
        block: int,
        dim: int,
    ) -> KVIndex:
        """From int32 arrays as `Batch` has them; `table` is the group's. ValueError where a table lacks a block."""
        counts = np.diff(offsets)
        owner = np.repeat(np.arange(len(counts)), counts)
        blocks = table[owner, positions // block].astype(np.int64)
        first = np.maximum(positions[offsets[:-1]] - (window or 1 << 30) + 1, 0) // block
        last = (lengths - 1) // block
        for row in range(len(counts)):
            if (table[row, first[row] : last[row] + 1] < 0).any():
                raise ValueError(f"row {row}: the block table has no block for a position that is read")
        tiles = []
        line = 2 * kv_heads * block * dim
        for rows, queries in _tiles(counts, last - first + 1, heads=heads, line=line, block=block):
            begin = queries.start
            tokens = offsets[rows][:, None] + np.arange(begin, queries.stop)
            seen_from = np.maximum(positions[tokens[:, 0]] - (window or 1 << 30) + 1, 0) // block
            seen_to = positions[tokens[:, -1]] // block
            tiles.append(_tile(tokens, positions, table[rows], seen_from, seen_to, window, block))
        return cls(torch.from_numpy(blocks), torch.from_numpy(positions % block).long(), tuple(tiles))


def _tiles(
    counts: np.ndarray, blocks: np.ndarray, *, heads: int, line: int, block: int
) -> Iterator[tuple[np.ndarray, range]]:
    """(rows, which of their tokens): single tokens in groups of like length, longer rows alone and cut to size."""
    single = np.flatnonzero(counts == 1)
    single = single[np.argsort(-blocks[single], kind="stable")]
    while len(single):
        longest = int(blocks[single[0]])
        fit = max(1, WORKSPACE // (longest * (line + heads * block)))
        like = int((blocks[single[:fit]] * 2 >= longest).sum())
        yield single[:like], range(1)
        single = single[like:]
    for row in np.flatnonzero(counts > 1):
        fit = max(1, WORKSPACE // int(blocks[row] * heads * block))
        for begin in range(0, int(counts[row]), fit):
            yield np.array([row]), range(begin, min(begin + fit, int(counts[row])))


def _tile(
    tokens: np.ndarray,
    positions: np.ndarray,
    table: np.ndarray,
    seen_from: np.ndarray,
    seen_to: np.ndarray,
    window: int | None,
    block: int,
) -> Tile:
    count = int((seen_to - seen_from).max()) + 1
    numbers = seen_from[:, None] + np.arange(count)
    ids = np.take_along_axis(table, np.minimum(numbers, seen_to[:, None]), 1).astype(np.int64)
    at = positions[tokens][:, :, None]
    key = (numbers[:, :, None] * block + np.arange(block)).reshape(len(tokens), 1, -1)
    masked = key > at
    if window is not None:
        masked |= key <= at - window
    return Tile(
        torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(ids.reshape(-1)), torch.from_numpy(masked[:, None])
    )


def store(keys: Tensor, values: Tensor, *, index: KVIndex, pool: Stored) -> None:
    """Put keys (after rotation) and values into the pool, in its format (bfloat16: to nearest, ties to even; codes and
    scales: `kv.encode`).

    keys, values float32 [n, kv_heads × dim]; the pool is written at the places of the step's tokens.
    """
    shape = (-1, pool.kv_heads, pool.dim)
    pool.write(keys.view(shape), values.view(shape), index.blocks, index.places)


def attend(queries: Tensor, *, scale: float, softcap: float | None, index: KVIndex, pool: Stored) -> Tensor:
    """Softmax attention over what the pool holds (Vaswani et al. 2017; grouped heads, Ainslie et al. 2023).

    A token sees the positions up to its own, the last `window` of them where its group has one. score = scale × q·k,
    softcap × tanh(score / softcap) where there is one; masked scores have probability exactly 0.
    queries float32 [n, heads × dim] → float32 [n, heads × dim].
    """
    kv_heads, dim = pool.kv_heads, pool.dim
    out = torch.empty_like(queries)
    heads = queries.shape[1] // dim
    for tile in index.tiles:
        rows, asked = tile.tokens.shape
        keys, values = (
            x.view(rows, -1, *x.shape[1:]).transpose(1, 2).reshape(rows, kv_heads, -1, dim)
            for x in pool.read(tile.blocks)
        )
        q = pool.spread(queries[tile.tokens].view(rows, asked, kv_heads, heads // kv_heads, dim)).permute(0, 2, 3, 1, 4)
        scores = (q.reshape(rows, kv_heads, -1, dim) @ keys.transpose(2, 3)).mul_(scale)
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        scores = scores.view(rows, heads, asked, -1).masked_fill_(tile.masked, -torch.inf)
        chances = scores.softmax(-1).view(rows, kv_heads, -1, keys.shape[2])
        mixed = pool.spread(chances @ values).view(rows, kv_heads, heads // kv_heads, asked, dim)
        out[tile.tokens] = mixed.permute(0, 3, 1, 2, 4).reshape(rows, asked, heads * dim)
    return out


@dataclass(frozen=True, slots=True)
class _Shape:
    """Of a case's attention."""

    rows: tuple[tuple[int, int], ...]
    """(position of the row's first token, its tokens)."""
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    window: int | None = None
    softcap: float | None = None
    kv_format: str = "f32"


_SHAPES = {
    "decode, grouped heads": _Shape(((0, 1), (31, 1), (32, 1), (200, 1))),
    "chunks and decode, one key head": _Shape(((0, 70), (40, 1), (64, 33)), kv_heads=1),
    "a window": _Shape(((0, 100), (150, 1), (90, 3), (160, 1)), window=40),
    "a window of one, own key heads": _Shape(((0, 5), (33, 1)), window=1, kv_heads=4),
    "capped scores": _Shape(((0, 9), (37, 1)), softcap=5.0),
    "a bf16 pool": _Shape(((0, 40), (63, 1), (95, 1)), kv_format="bf16"),
    "an int8 pool": _Shape(((0, 40), (63, 1), (95, 1)), dim=64, kv_format="int8"),
    "an int8 pool, a head that is no power of two": _Shape(((30, 5),), dim=48, kv_format="int8"),
    "an int4 pool": _Shape(((0, 40), (63, 1), (95, 1)), kv_heads=1, dim=128, kv_format="int4"),
    "an int4 pool, a head that is no power of two": _Shape(((30, 5),), dim=48, kv_format="int4"),
}


def _kv_case(rng: np.random.Generator, shape: _Shape) -> KVCase:
    """Rows whose blocks lie scattered in a pool that is filled up to each row's first token; the rest is NaN."""
    lengths = np.array([start + count for start, count in shape.rows], np.int32)
    most = int(lengths.max() - 1) // 32 + 1
    free = iter(rng.permutation(len(lengths) * most))
    numbers = np.full((len(lengths) * most, 2, shape.kv_heads, 32, shape.dim), np.nan, np.float32)
    table = np.full((len(lengths), most), -1, np.int32)
    for row, (start, count) in enumerate(shape.rows):
        first = 0 if shape.window is None else max(start - shape.window + 1, 0) // 32
        for number in range(first, (start + count - 1) // 32 + 1):
            table[row, number] = next(free)
            numbers[table[row, number]] = rng.standard_normal(numbers.shape[1:])
    form = KV_FORMATS[shape.kv_format]
    parts = [
        encode(torch.from_numpy(numbers[:, which]), bits).flatten(1)
        for which, bits in enumerate((form.key_bits, form.value_bits))
    ]
    return KVCase(
        pool=torch.cat(parts, 1).numpy(),
        kv_format=shape.kv_format,
        kv_heads=shape.kv_heads,
        dim=shape.dim,
        positions=np.concatenate([np.arange(s, s + n) for s, n in shape.rows]).astype(np.int32),
        offsets=np.cumsum([0, *(n for _, n in shape.rows)]).astype(np.int32),
        lengths=lengths,
        table=table,
        window=shape.window,
    )


def _store_cases(rng: np.random.Generator) -> Iterator[Case]:
    for name, shape in _SHAPES.items():
        kv = _kv_case(rng, shape)
        n = len(kv.positions)
        keys, values = (rng.standard_normal((n, shape.kv_heads * shape.dim), np.float32) for _ in range(2))
        yield Case(name, (keys, values), kv=kv)


def _attend_cases(rng: np.random.Generator) -> Iterator[Case]:
    for name, shape in _SHAPES.items():
        kv = _kv_case(rng, shape)
        queries = 2 * rng.standard_normal((len(kv.positions), shape.heads * shape.dim), np.float32)
        yield Case(name, (queries,), attrs={"scale": 0.3, "softcap": shape.softcap}, kv=kv)


STORE = Op(signatures.STORE, store, _store_cases, 0.0)
ATTEND = Op(signatures.ATTEND, attend, _attend_cases, 3e-6)
