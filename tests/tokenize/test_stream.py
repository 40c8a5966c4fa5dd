"""`TextStream` against the slow definition: decode everything, then look for the first stop string."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.tokenize.stream import TextStream
from headrace.tokenize.tokenizer import Tokenizer
from tests.tokenize.made import byte_level, pieces

BYTES = Tokenizer.from_gguf(byte_level(("ab", "bca", "😀", "é", "DAY", "MON"), ("<|end|>", "<x>")))
PIECES = Tokenizer.from_gguf(pieces(("\u2581ab", "ab", "abc", "a", "b", "c", "\u2581", "é"), ("<x>",)))
BOTH = pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])


def play(stream: TextStream, tokens: Sequence[int]) -> tuple[list[str], list[str], str | None]:
    """(pieces, shown texts, stop string) of a whole answer, `finish` included."""
    fed = [stream.feed(token) for token in tokens]
    shown = [text for _, text in fed]
    if stream.stopped is None:
        shown.append(stream.finish())
    return [piece for piece, _ in fed], shown, stream.stopped


def first_stop(texts: list[str], stop: Sequence[str], least: int) -> tuple[str, int] | None:
    """The slow definition. `texts`: decoded after 0, 1, ... tokens. (stop string, where it ends) of the one complete
    first, of those with the same end the longest, no earlier than with token number `least`."""
    whole = texts[-1]
    for end in range(1, len(whole) + 1):
        token = next(i for i, text in enumerate(texts) if len(text) >= end)
        matched = [s for s in stop if whole[:end].endswith(s)]
        if matched and token >= least:
            return max(matched, key=len), end
    return None


@BOTH
@settings(max_examples=600, deadline=None)
@given(
    data=st.data(),
    stop=st.lists(
        st.text("ab", min_size=1, max_size=4) | st.sampled_from(["é", "bé", " ", "\ufffd", "<x>"]), max_size=4
    ),
    include=st.booleans(),
    skip=st.booleans(),
    least=st.integers(0, 8),
)
def test_as_the_slow_definition(
    tokenizer: Tokenizer, data: st.DataObject, stop: list[str], include: bool, skip: bool, least: int
) -> None:
    every = range(tokenizer.vocab_size + 3)
    few = [i for i in every if tokenizer.piece(i) in (b"a", b"b", b"ab")]
    cut = [i for i in every if tokenizer.piece(i).decode("latin1") in "\xc3\xa9\xe2\xf0\x9f\x98\x80"]
    mixed = st.sampled_from(few) | st.sampled_from(cut) | st.sampled_from(every)
    tokens = data.draw(st.lists(st.sampled_from(few), min_size=3, max_size=14) | st.lists(mixed, max_size=14))
    texts = [tokenizer.decode(tokens[:i], skip_special=skip) for i in range(len(tokens) + 1)]
    found = first_stop(texts, stop, least)
    want = texts[-1] if found is None else texts[-1][: found[1] - (0 if include else len(found[0]))]
    stream = TextStream(tokenizer, stop=stop, include_stop=include, skip_special=skip, min_tokens=least)
    completed, shown, stopped = play(stream, tokens)
    assert "".join(shown) == want
    assert stopped == (found and found[0])
    if found is None:
        assert "".join(completed) == want
    so_far = ""
    for i, text in enumerate(shown[: len(tokens)], 1):
        so_far += text
        assert texts[i].startswith(so_far)  # whole characters, and none before its time
    if not stop:
        assert so_far == texts[-1]  # nothing is held without a reason


@BOTH
def test_stop_string_over_several_tokens(tokenizer: Tokenizer) -> None:
    """S1"""
    tokens = tokenizer.encode("MONDAYTUESDAY", add_bos=False)
    assert len(tokens) > 3
    _, shown, stopped = play(TextStream(tokenizer, stop=["DAYTUE"]), tokens)
    assert ("".join(shown), stopped) == ("MON", "DAYTUE")
    _, shown, stopped = play(TextStream(tokenizer, stop=["DAYTUE"]), tokenizer.encode("MONDAYT", add_bos=False))
    assert ("".join(shown), stopped) == ("MONDAYT", None)
    _, shown, stopped = play(TextStream(tokenizer, stop=["SDAY", "DAYTUE"]), tokens)
    assert ("".join(shown), stopped) == ("MON", "DAYTUE")
    _, shown, stopped = play(TextStream(tokenizer, stop=["DAYTUE"], include_stop=True), tokens)
    assert "".join(shown) == "MONDAYTUE"


@pytest.mark.parametrize(
    ("text", "stop", "least", "shown"),
    [
        ("aaab", "aab", 0, "a"),
        ("ababac", "abac", 0, "ab"),
        ("abaabab", "abab", 0, "aba"),
        ("aaaa", "aa", 3, "a"),
        ("ababab", "aba", 4, "ab"),
    ],
)
def test_stop_strings_that_overlap_themselves(text: str, stop: str, least: int, shown: str) -> None:
    tokens = [BYTES.encode(char)[0] for char in text]
    _, texts, stopped = play(TextStream(BYTES, stop=[stop], min_tokens=least), tokens)
    assert ("".join(texts), stopped) == (shown, stop)


def test_text_is_held_only_while_it_may_be_a_stop_string() -> None:
    stream = TextStream(BYTES, stop=["abc", "bd"])
    fed = [stream.feed(BYTES.encode(char)[0]) for char in "xabxbba"]
    assert fed == [("x", "x"), ("a", ""), ("b", ""), ("x", "abx"), ("b", ""), ("b", "b"), ("a", "b")]
    assert stream.finish() == "a"
    assert stream.finish() == ""


def test_one_token_with_a_stop_string_inside() -> None:
    bca = next(i for i in range(BYTES.vocab_size) if BYTES.piece(i) == b"bca")
    stream = TextStream(BYTES, stop=["c"])
    assert stream.feed(bca) == ("b", "b")
    assert stream.stopped == "c"
    assert stream.feed(bca) == ("", "")
    assert stream.finish() == ""
    including = TextStream(BYTES, stop=["c"], include_stop=True)
    assert including.feed(bca) == ("bc", "bc")


def test_stop_strings_count_from_the_least_number_of_tokens_on() -> None:
    a = BYTES.encode("a")[0]
    for least, shown in ((0, 0), (1, 0), (2, 1), (5, 4)):
        stream = TextStream(BYTES, stop=["a"], min_tokens=least)
        _, texts, stopped = play(stream, [a] * 8)
        assert ("".join(texts), stopped) == ("a" * shown, "a")
    _, texts, stopped = play(
        TextStream(BYTES, stop=["ab"], min_tokens=3), BYTES.encode("a")[:1] + BYTES.encode("b") + [a]
    )
    assert ("".join(texts), stopped) == ("aba", None)


CHARS = "😀霓é👩‍👩‍👧"


@BOTH
@pytest.mark.parametrize("skip", [True, False])
def test_characters_over_several_tokens(tokenizer: Tokenizer, skip: bool) -> None:
    """S3"""
    tokens = tokenizer.encode(CHARS, add_bos=False)
    assert len(tokens) >= 20
    for count in range(len(tokens) + 1):
        _, shown, _ = play(TextStream(tokenizer, skip_special=skip), tokens[:count])
        joined = "".join(shown)
        assert joined == tokenizer.decode(tokens[:count])
        assert "\ufffd" not in joined
        assert CHARS.startswith(joined)
        whole = b"".join(map(tokenizer.piece, tokens[:count])).decode("utf-8", "ignore").removeprefix(" ")
        assert joined == whole  # no stall
    assert joined == CHARS


@BOTH
def test_bytes_that_are_no_text_are_shown_as_such(tokenizer: Tokenizer) -> None:
    byte = {tokenizer.piece(i): i for i in range(tokenizer.vocab_size)}
    broken = [byte[bytes([b])] for b in (0xE9, 0x61, 0xFF, 0xF0, 0x9F, 0x98)]
    stream = TextStream(tokenizer)
    assert [stream.feed(token)[1] for token in broken] == ["", "\ufffda", "\ufffd", "", "", ""]
    assert stream.finish() == ""
    assert tokenizer.decode(broken) == "\ufffda\ufffd"


def test_control_tokens_are_hidden_or_shown() -> None:
    tokens = BYTES.encode("a<|end|>b<x>")
    assert len(tokens) == 4
    assert play(TextStream(BYTES), tokens)[:2] == (["a", "", "b", ""], ["a", "", "b", "", ""])
    assert "".join(play(TextStream(BYTES, skip_special=False), tokens)[1]) == "a<|end|>b<x>"
    assert play(TextStream(BYTES, stop=["<|end|>"]), tokens)[2] is None
    assert play(TextStream(BYTES, stop=["end"], skip_special=False), tokens)[1][:2] == ["a", "<|"]


def test_the_space_in_front_of_a_text() -> None:
    ab = PIECES.encode("ab ab", add_bos=False)
    assert play(TextStream(PIECES), ab)[1][:2] == ["ab", " ab"]
    assert play(TextStream(PIECES, skip_special=False), [1, *ab])[1][:3] == ["<s>", " ab", " ab"]
    assert play(TextStream(PIECES), [PIECES.vocab_size + 5, 1, *ab])[1][:3] == ["", "", "ab"]


@pytest.mark.parametrize("text", ["ab" * 20_000, "a" * 40_000])
def test_cheap_for_every_token(text: str) -> None:
    """Also with a long stop string that is nearly there all the time."""
    tokens = BYTES.encode(text)
    start = time.perf_counter()
    stream = TextStream(BYTES, stop=["a" * 4000 + "b", "ab" * 2000 + "c", "zz"])
    _, shown, _ = play(stream, tokens)
    assert "".join(shown) == text
    assert time.perf_counter() - start < 10  # quadratic: minutes


def test_the_choices_of_a_request_share_what_is_known_of_its_stop_strings() -> None:
    """2,048 choices would cost the engine's thread 40 seconds otherwise."""
    stop = ["a" * 4095 + letter for letter in "bcdefghijklmnopq"]
    TextStream(PIECES, stop=stop)
    start = time.perf_counter()
    for _ in range(200):
        TextStream(PIECES, stop=stop)
    assert time.perf_counter() - start < 0.5


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 258), max_size=30))
@example([0xF0, 0x9F])
def test_no_stop_strings_no_holding(tokens: list[int]) -> None:
    stream = TextStream(BYTES)
    fed = [stream.feed(token) for token in tokens]
    assert all(piece == text for piece, text in fed)
    assert stream.finish() == ""
