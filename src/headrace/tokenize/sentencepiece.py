"""The merges that a SentencePiece vocabulary implies, where a file lists scores and no merges. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np


def derive_merges(tokens: Sequence[str], scores: Sequence[float], barred: Collection[int] = ()) -> np.ndarray:
    """int32 [merges, 2]: ids of left and right part, best first; only such as can ever happen.

    A pair of tokens that together spell a third may merge; the higher the third's score, the sooner. Of equal score:
    the longer left part, then the order of the vocabulary, as transformers sorts them. `barred` tokens are never made:
    control tokens, which no text may become by merging.

    A token's parts are always merged in the same order, whatever stands around it: a merge across its edge would have
    kept it from coming about. So one last merge per token is enough, the one that comes last in the token alone, and
    the others, about half, are left out; loading is the quicker for it.
    """
    ids = {token: i for i, token in enumerate(tokens)}
    merges = _candidates(ids, scores, frozenset(barred))
    ways = Counter(made for made, _, _ in merges)
    base = len(tokens) + 1
    rank = {left * base + right: i for i, (_, left, right) in enumerate(merges)}
    last = {made: _last_merge(tokens[made], ids, rank, merges) for made, count in ways.items() if count > 1}
    kept = [(left, right) for made, left, right in merges if ways[made] == 1 or last[made] == (left, right)]
    return np.array(kept, np.int32).reshape(-1, 2)


def _candidates(ids: dict[str, int], scores: Sequence[float], barred: frozenset[int]) -> list[tuple[int, int, int]]:
    """(made, left, right) of every split of a token into two tokens, best first."""
    find = ids.get
    ranked: list[tuple[float, int, tuple[int, int, int]]] = []
    for token, made in ids.items():
        if made in barred:
            continue
        score = -float(scores[made])
        ways = []
        for cut in range(1, len(token)):
            left = find(token[:cut])
            if left is not None:
                right = find(token[cut:])
                if right is not None:
                    ways.append((score, -cut, (made, left, right)))
        if len(ways) > 1:
            ways.sort(key=lambda way: way[2][1:])
        ranked += ways
    ranked.sort(key=lambda way: way[:2])
    return [way for _, _, way in ranked]


def _last_merge(
    token: str, ids: dict[str, int], rank: dict[int, int], merges: list[tuple[int, int, int]]
) -> tuple[int, int] | None:
    """The pair that byte-pair encoding of `token` alone merges last; None where it does not arrive at the token."""
    unknown = len(ids)
    base = unknown + 1
    symbols = [ids.get(char, unknown) for char in token]
    pair: tuple[int, int] | None = None
    while len(symbols) > 1:
        ranks = [rank.get(left * base + right) for left, right in pairwise(symbols)]
        best = min((r for r in ranks if r is not None), default=None)
        if best is None:
            return None
        at = ranks.index(best)
        made, pair = merges[best][0], merges[best][1:]
        symbols[at : at + 2] = [made]
    return pair
