"""What of the text goes out, and when: stop strings, whole characters, log-probabilities cut with the text."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headrace.engine.outputs import Chunk, Logprob
from headrace.serve.choices import Shown, joined
from tests.serve.fake_llm import FakeTokenizer
from tests.serve.http_api import Api


def both(api: Api, **body: Any) -> dict[str, Any]:
    """The choice of a completion, which must be the same in a chat and in both streams."""
    whole = api.complete(seed=1, **body).json()["choices"][0]
    parts = [event["choices"][0] for event in api.complete_events(seed=1, **body)]
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [whole["finish_reason"]]
    assert parts[-1]["stop_reason"] == whole["stop_reason"]
    chat = api.chat(seed=1, **body).json()["choices"][0]
    assert chat["message"]["content"] == whole["text"]
    assert (chat["finish_reason"], chat["stop_reason"]) == (whole["finish_reason"], whole["stop_reason"])
    deltas = [event["choices"][0]["delta"].get("content", "") for event in api.chat_events(seed=1, **body)]
    assert "".join(deltas) == whole["text"]
    for text in (*deltas, *(part["text"] for part in parts)):
        assert "�" not in text
    return whole


@pytest.mark.parametrize(
    ("says", "stop", "text", "reason"),
    [
        ("MONDAYTUESDAY", ["DAYTUE"], "MON", "DAYTUE"),
        ("MONDAYTUESDAY", "DAYTUE", "MON", "DAYTUE"),
        ("MONDAYT", ["DAYTUE"], "MONDAYT", None),
        ("MONDAYTUESDAY", ["TUES", "AYT"], "MOND", "AYT"),
        ("MONDAYTUESDAY", ["AYT", "TUES"], "MOND", "AYT"),
        ("MONDAYTUESDAY", ["SDAY", "NDA"], "MO", "NDA"),
        ("MONDAYTUESDAY", ["MONDAYTUES", "TUE"], "MONDAY", "TUE"),
        ("MONDAYTUESDAY", ["UE", "AYTUE", "X"], "MOND", "AYTUE"),
        ("MONDAYTUESDAY", ["X", "MONDAYTUESDAYS"], "MONDAYTUESDAY", None),
        ("aaab", ["aab"], "a", "aab"),
        ("MONDAY", ["M"], "", "M"),
        ("é hello", ["é"], "", "é"),
    ],
)
def test_s1_stop_strings(api: Api, says: str, stop: Any, text: str, reason: str | None) -> None:
    api.llm.says(says)
    choice = both(api, stop=stop, max_tokens=50)
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", reason)


def test_s1_never_goes_out_before_it_is_sure(api: Api) -> None:
    api.llm.says("MONDAYTUESDAY", step_s=0.01)
    texts = [event["choices"][0]["text"] for event in api.complete_events(stop=["DAYTUE"], max_tokens=50)]
    assert texts == ["MON", ""]
    kept = both(api, stop=["DAYTUE"], max_tokens=50, include_stop_str_in_output=True)
    assert kept["text"] == "MONDAYTUE"


@pytest.mark.parametrize("most", range(1, 21))
def test_s3_whole_characters(api: Api, most: int) -> None:
    text = "😀霓é👩‍👩‍👧"
    api.llm.says(text)
    choice = both(api, max_tokens=most)
    expected = text.encode()[:most].decode(errors="ignore")
    assert choice["text"] == expected
    assert choice["finish_reason"] == "length"


def test_stop_cuts_the_logprobs_with_the_text(api: Api) -> None:
    api.llm.says("hello world, MONDAYTUESDAY")
    for stop, tokens in (
        (["DAYTUE"], ["hello", " world", ", ", "MON"]),
        (["ONDAYTUE"], ["hello", " world", ", ", "M"]),
        (["AYT"], ["hello", " world", ", ", "MON", "D"]),
        (["hello"], []),
    ):
        body = {"stop": stop, "logprobs": 1, "max_tokens": 50, "seed": 1}
        choice = api.complete(**body).json()["choices"][0]
        assert choice["logprobs"]["tokens"] == tokens
        assert choice["text"] == "".join(tokens)
        parts = [event["choices"][0] for event in api.complete_events(**body)]
        assert all(len("".join(part["logprobs"]["tokens"])) <= len(part["text"]) for part in parts[:-1])
        merged = {key: [one for part in parts for one in part["logprobs"][key]] for key in choice["logprobs"]}
        assert merged == choice["logprobs"]
        chat = api.chat(**(body | {"logprobs": True})).json()["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in chat] == tokens


def test_shown_covers_random_texts() -> None:
    """However text and tokens are cut into chunks: the entries of all parts joined are the text, part by part."""
    rng = random.Random(5)
    tokenizer = FakeTokenizer()
    for _ in range(500):
        pieces = ["".join(rng.choices("ab", k=rng.randrange(4))) for _ in range(rng.randrange(1, 12))]
        whole = "".join(pieces)
        text = whole[: rng.randrange(len(whole) + 1)] if rng.random() < 0.5 else whole
        shown, at, done, parts = Shown(0, 1), 0, 0, []
        while done < len(pieces):
            more = rng.randrange(1, 4)
            step = pieces[done : done + more]
            done += len(step)
            last = done >= len(pieces)
            known = min(len("".join(pieces[:done])), len(text))
            end = len(text) if last else rng.randrange(at, known + 1)
            position = [{0: Logprob(-1.0)}] * len(step)
            tokens = tuple(range(len(step)))
            chunk = Chunk("r", 0, text[at:end], tokens, tuple(step), position, "stop" if last else None)
            at = end
            if part := shown.add(chunk):
                parts.append(part)
        for part in parts[:-1]:
            assert part.text, "no empty part before the end"
        assert joined(parts).text == text
        assert "".join(entry.text for entry in joined(parts).entries) == text
        shorter = ""
        covered = ""
        for part in parts:
            shorter += part.text
            covered += "".join(entry.text for entry in part.entries)
            assert shorter.startswith(covered), "no entry before its text"
    assert tokenizer.vocab_size > 256
