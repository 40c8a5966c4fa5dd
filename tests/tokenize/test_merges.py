"""Merges derived from scores: leaving out those that never happen changes nothing."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from headrace.tokenize.sentencepiece import derive_merges


def every_merge(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """All pairs that spell a token, best first: the slow definition."""
    found = [
        (-scores[made], -cut, token[:cut], token[cut:])
        for made, token in enumerate(tokens)
        for cut in range(1, len(token))
        if token[:cut] in tokens and token[cut:] in tokens
    ]
    return [(left, right) for _, _, left, right in sorted(found, key=lambda way: way[:2])]


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.text("abc", min_size=2, max_size=5), min_size=1, max_size=14, unique=True),
    st.randoms(use_true_random=False),
    st.lists(st.text("abcd", max_size=14), min_size=1, max_size=6),
)
def test_the_same_ids_as_with_every_merge(words: list[str], random: object, texts: list[str]) -> None:
    tokens = [*"abcd", *words]
    scores = [float(random.randrange(2 * len(tokens))) for _ in tokens]  # type: ignore[attr-defined]
    kept = [(tokens[left], tokens[right]) for left, right in derive_merges(tokens, scores).tolist()]
    full = every_merge(tokens, scores)
    assert set(kept) <= set(full)
    assert len({left + right for left, right in kept}) == len(kept)
    ids = {token: i for i, token in enumerate(tokens)}
    few, many = (Tokenizer(models.BPE(vocab=ids, merges=merges)) for merges in (kept, full))
    for text in texts:
        assert few.encode(text).ids == many.encode(text).ids


def test_barred_tokens_are_not_made() -> None:
    tokens = ["a", "b", "ab", "aba"]
    assert derive_merges(tokens, [0, 0, -1, -2]).tolist() == [[0, 1], [2, 0]]
    assert derive_merges(tokens, [0, 0, -1, -2], barred=[3]).tolist() == [[0, 1]]
    assert derive_merges(["a"], [0]).shape == (0, 2)


def test_of_equal_score_the_longer_left_part_comes_first() -> None:
    """Then the order of the vocabulary; so does transformers."""
    tokens = ["a", "b", "c", "bc", "aa", "aab", "ca"]
    order = [(tokens[left], tokens[right]) for left, right in derive_merges(tokens, [0.0] * 7).tolist()]
    assert order == [("aa", "b"), ("b", "c"), ("a", "a"), ("c", "a")]
