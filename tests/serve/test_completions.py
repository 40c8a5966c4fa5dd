"""Completions: forms of the prompt, echo, log-probabilities, several prompts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.fake_llm import BOS, EOS, PIECES, TURN, Script
from tests.serve.http_api import Api, error_of, usage

PROMPTS = ["\n2. A farm with 15", "中文 hello 😀👩‍👩‍👧 world", "a<|turn|>b<|end|>", "x" * 40, "é"]


def test_answer_has_every_field(api: Api) -> None:
    answer = api.complete(seed=3).json()
    assert set(answer) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "hello world, MONDAY",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "seed": 3,
        }
    ]
    assert answer["usage"] == usage(2, 6)


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("hi", [[104, 105]]),
        (["hi"], [[104, 105]]),
        (["hi", "x"], [[104, 105], [120]]),
        ([104, 105], [[104, 105]]),
        ([[104, 105]], [[104, 105]]),
        ([[104], [105, 106], [299]], [[104], [105, 106], [299]]),
    ],
)
def test_forms_of_prompts(api: Api, prompt: Any, ids: list[list[int]]) -> None:
    api.llm.script = lambda prompt, choice: Script([*prompt[:1], 65 + choice])
    answer = api.complete(prompt=prompt, n=2, max_tokens=2).json()
    assert [submitted for submitted, _ in api.llm.submitted] == ids
    texts = [bytes([one[0]]).decode() + "AB"[c] if one[0] < 256 else "AB"[c] for one in ids for c in range(2)]
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == list(enumerate(texts))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert answer["usage"]["completion_tokens"] == 4 * len(ids)
    events = api.complete_events(prompt=prompt, n=2, max_tokens=2, stream_options={"include_usage": True})
    joined = dict.fromkeys(range(len(texts)), "")
    for event in events[:-1]:
        joined[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert list(joined.values()) == texts
    assert events[-1]["usage"] == answer["usage"]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([""], "prompt"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        (["ok", ""], "prompt[1]"),
        ([[1], []], "prompt[1]"),
        (None, "prompt"),
        (5, "prompt"),
        (True, "prompt"),
        ({}, "prompt"),
        ([None], "prompt"),
        ([1.5], "prompt"),
        ([True], "prompt"),
        ([1, True], "prompt[1]"),
        (["a", 1], "prompt[1]"),
        ([[1], "a"], "prompt[1]"),
        ([[1, "a"]], "prompt[0][1]"),
        ([[[1]]], "prompt[0][0]"),
    ],
)
def test_v1_empty_and_mixed_prompts(api: Api, prompt: Any, param: str) -> None:
    error_of(api.complete(prompt=prompt), 400, param)
    error_of(api.complete(prompt=prompt, stream=True), 400, param)
    assert not api.llm.submitted, "no half of a request runs"


def test_each_prompt_is_judged_once_and_by_name(api: Api) -> None:
    assert api.complete(prompt=["a", "b", "c"], max_tokens=1).status_code == 200
    assert api.llm.checked == 3
    message = error_of(api.complete(prompt=["a", "b" * 600], max_tokens=1), 400, "prompt[1]")
    assert message.startswith("prompt[1] has 600 tokens; ")


def test_v1_with_bos_an_empty_prompt_is_legal(api: Api) -> None:
    api.llm.tokenizer.add_bos = True
    assert api.complete(prompt="").status_code == 200
    assert api.llm.submitted[-1][0] == [BOS]
    answer = api.complete(prompt="", echo=True, logprobs=1, max_tokens=1).json()["choices"][0]
    assert answer["logprobs"]["tokens"] == ["", "hello"]
    assert answer["text"] == "hello"


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("alternatives", [0, 1, 5])
@pytest.mark.parametrize("most", [0, 1, 5])
def test_s4_echo_with_logprobs(api: Api, prompt: str, alternatives: int, most: int) -> None:
    api.llm.says("\n😀 A farm")
    body = {"prompt": prompt, "max_tokens": most, "temperature": 0, "logprobs": alternatives, "echo": True, "seed": 1}
    choice = api.complete(**body).json()["choices"][0]
    ids = api.llm.submitted[-1][0]
    assert choice["text"].startswith(prompt)
    assert choice["finish_reason"] == "length"
    check_arrays(choice["text"], choice["logprobs"], alternatives)
    assert len(choice["logprobs"]["tokens"]) == len(ids) + most
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert all(value is not None for value in choice["logprobs"]["token_logprobs"][1:])
    parts = [event["choices"][0] for event in api.complete_events(**body)]
    assert "".join(part["text"] for part in parts) == choice["text"]
    merged = {key: [one for part in parts for one in part["logprobs"][key]] for key in choice["logprobs"]}
    assert merged == choice["logprobs"]
    assert parts[-1]["finish_reason"] == "length"


def check_arrays(text: str, logprobs: dict[str, list[Any]], alternatives: int) -> None:
    tokens, offsets = logprobs["tokens"], logprobs["text_offset"]
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert len({len(values) for values in logprobs.values()}) == 1
    assert "".join(tokens) == text
    assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]
    for own, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        if own is not None:
            assert own in top.values(), "the chosen token is among them"
            assert max(alternatives, 1) - 1 <= len(top) <= alternatives + 1


def test_echo_without_logprobs(api: Api) -> None:
    choice = api.complete(prompt="hello", echo=True, max_tokens=1).json()["choices"][0]
    assert (choice["text"], choice["logprobs"]) == ("hellohello", None)
    choice = api.complete(prompt="hello<|turn|>", echo=True, max_tokens=0).json()
    assert choice["choices"][0]["text"] == "hello<|turn|>"
    assert choice["choices"][0]["logprobs"] is None
    assert choice["usage"] == usage(2, 0)
    events = api.complete_events(prompt="hello", echo=True, max_tokens=1)
    assert [event["choices"][0]["text"] for event in events] == ["hellohello"]
    error_of(api.complete(max_tokens=0), 400, "max_tokens")
    error_of(api.complete(max_tokens=0, logprobs=1), 400, "max_tokens")


@pytest.mark.parametrize(("logprobs", "named"), [({}, "max_tokens"), ({"logprobs": 1}, "logprobs")])
def test_a_prompt_without_its_middle_has_no_log_probabilities(api: Api, logprobs: dict[str, int], named: str) -> None:
    """A refusal names a field that the client sent."""
    body: dict[str, Any] = {"prompt": [1] * 600, "echo": True, "max_tokens": 0, "overflow": "truncate-middle"}
    error_of(api.complete(**body, **logprobs), 400, named)


def test_echo_of_control_tokens(api: Api) -> None:
    api.llm.tokenizer.add_bos = True
    own = api.complete(prompt="a<|turn|>", echo=True, max_tokens=1, logprobs=0).json()["choices"][0]
    assert own["logprobs"]["tokens"] == ["", "a", "<|turn|>", "hello"]
    typed = api.complete(prompt="<|bos|>a", echo=True, max_tokens=1, logprobs=0).json()["choices"][0]
    assert typed["text"].startswith("<|bos|>")
    ids = api.complete(prompt=[BOS, TURN, 97, 299], echo=True, max_tokens=1, logprobs=0).json()["choices"][0]
    assert ids["logprobs"]["tokens"] == ["<|bos|>", "<|turn|>", "a", "", "hello"]


def test_echo_with_several_prompts_and_choices(api: Api) -> None:
    for late in (False, True):
        api.llm.late_prompt_logprobs = late
        body = {"prompt": ["hello", "é x"], "echo": True, "n": 3, "logprobs": 2, "max_tokens": 2, "seed": 1}
        choices = api.complete(**body).json()["choices"]
        assert [choice["text"] for choice in choices] == ["hellohello world"] * 3 + ["é xhello world"] * 3
        for choice in choices:
            check_arrays(choice["text"], choice["logprobs"], 2)
        joined = [""] * 6
        tokens: list[list[str]] = [[] for _ in range(6)]
        for event in api.complete_events(**body):
            part = event["choices"][0]
            joined[part["index"]] += part["text"]
            tokens[part["index"]] += part["logprobs"]["tokens"]
        assert joined == [choice["text"] for choice in choices]
        assert tokens == [choice["logprobs"]["tokens"] for choice in choices]


def test_parts_of_characters_have_names(api: Api) -> None:
    api.llm.says("é")
    logprobs = api.complete(logprobs=0).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["", "é", ""]
    assert [list(top) for top in logprobs["top_logprobs"]] == [["bytes:\\xc3"], ["bytes:\\xa9"], ["<|end|>"]]


def test_default_length(api: Api) -> None:
    api.llm.script = lambda prompt, choice: Script([120] * 600)
    assert api.complete().json()["usage"]["completion_tokens"] == 16
    assert api.complete(max_tokens=None).json()["usage"]["completion_tokens"] == 510
    assert api.complete(prompt=[1] * 500).json()["usage"]["completion_tokens"] == 12
    several = api.complete(prompt=[[1] * 500, [1]]).json()
    assert several["usage"]["completion_tokens"] == 28
    api.llm.reset()


def test_too_many_choices(api: Api) -> None:
    error_of(api.complete(prompt=["x"] * 2049), 400, "prompt")
    error_of(api.complete(prompt=["x"] * 1025, n=2), 400, "prompt")
    error_of(api.complete(n=129), 400, "n")
    assert not api.llm.submitted
    assert len(api.complete(prompt=["x"] * 40, n=2, max_tokens=1).json()["choices"]) == 80


def test_pieces_with_line_ends_of_other_readers(api: Api) -> None:
    """U+2028 and U+0085 stand in JSON as they are, but line readers of many clients split there."""
    text = "a\u2028b\x85c\u2029d\r\ne"
    api.llm.says(text)
    response = api.complete(stream=True, max_tokens=100)
    lines = response.text.splitlines()
    assert all(line == "" or line.startswith("data: ") for line in lines)
    assert "".join(e["choices"][0]["text"] for e in api.complete_events(max_tokens=100)) == text
    assert api.complete(max_tokens=100).json()["choices"][0]["text"] == text


def test_fake_pieces_are_what_the_tests_assume() -> None:
    assert PIECES[0] == "MON"
    assert EOS == 257
