"""/tokenize and /detokenize over the scripted tokenizer: case T3 among them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from headrace.engine.admission import LONGEST
from tests.serve.fake_llm import BOS, CONTEXT, EOS, TURN, VOCAB
from tests.serve.http_api import Api, error_of

TALK = [{"role": "user", "content": "hi<|end|>"}]


def tokenize(api: Api, **body: Any) -> httpx.Response:
    return api.http.post("/tokenize", json=body)


def ids(api: Api, **body: Any) -> list[int]:
    answer = tokenize(api, **body).json()
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == CONTEXT
    assert answer["token_strs"] is None
    return answer["tokens"]


def test_a_prompt(api: Api) -> None:
    assert ids(api, prompt="hé") == list("hé".encode())
    assert ids(api, prompt="") == []
    assert ids(api, prompt="<|turn|>a") == [TURN, 97]
    assert ids(api, prompt="<|turn|>a", parse_special=False) == list(b"<|turn|>a")
    api.llm.tokenizer.add_bos = True
    assert ids(api, prompt="a", model="fake-model") == [BOS, 97]
    assert ids(api, prompt="a", add_special_tokens=False) == [97]


def test_a_conversation_is_what_a_chat_would_read(api: Api) -> None:
    for more in (
        {},
        {"parse_special": True},
        {"add_generation_prompt": False},
        {"continue_final_message": True, "messages": [*TALK, {"role": "assistant", "content": "x"}]},
        {"chat_template_kwargs": {"a": 1}, "parse_special": False},
    ):
        body: dict[str, Any] = {"messages": TALK, **more}
        got = ids(api, **body)
        assert api.chat(max_tokens=1, **body).status_code == 200
        assert api.llm.submitted[-1][0] == got
        assert got.count(EOS) == len(body["messages"]) - ("continue_final_message" in more) + (
            "parse_special" in more and bool(more["parse_special"])
        )


def test_names_of_tokens(api: Api) -> None:
    answer = tokenize(api, prompt="é<|turn|>MON", return_token_strs=True).json()
    assert answer["token_strs"] == ["bytes:\\xc3", "bytes:\\xa9", "<|turn|>", "MON"]


def test_and_back(api: Api) -> None:
    def text(tokens: list[int]) -> str:
        response = api.http.post("/detokenize", json={"tokens": tokens})
        assert response.status_code == 200, response.text
        assert set(response.json()) == {"prompt"}
        return response.json()["prompt"]

    for prompt in ("", "hé 😀", "<|turn|>hello world"):
        assert text(ids(api, prompt=prompt)) == prompt
    assert text([VOCAB - 1]) == "", "an id that the model has and the tokenizer does not"
    assert text([5] * 100_000) == "\x05" * 100_000


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "a", "messages": TALK}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "x" * (LONGEST + 1)}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": "a"}, "messages"),
        ({"messages": TALK, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": TALK, "continue_final_message": True}, "continue_final_message"),
        ({"messages": TALK, "continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": TALK, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ({"messages": TALK, "tools": [{}]}, "tools"),
        ({"messages": TALK, "chat_template": "x"}, "chat_template"),
        ({"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
        ({"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ({"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
        ({"prompt": "a", "foo": 1}, "foo"),
        ({"content": "a"}, "content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
            "messages[0].content[0].type",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_refused(api: Api, body: dict[str, Any], param: str) -> None:
    error_of(tokenize(api, **body), 400, param)


@pytest.mark.parametrize("field", ["text", "input", "content"])
def test_other_names_of_the_prompt(api: Api, field: str) -> None:
    assert error_of(tokenize(api, **{field: "a"}), 400, field) == f"{field} is refused: send prompt"


@pytest.mark.parametrize(
    ("tokens", "param"),
    [
        (None, "tokens"),
        ("a", "tokens"),
        ([1.0], "tokens[0]"),
        ([1, True], "tokens[1]"),
        ([1, -1], "tokens[1]"),
        ([VOCAB], "tokens[0]"),
        ([2**63], "tokens[0]"),
        ([1] * (LONGEST + 1), "tokens"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_ids_that_are_none(api: Api, tokens: Any, param: str) -> None:
    error_of(api.http.post("/detokenize", json={"tokens": tokens}), 400, param)


def test_unknown_models(api: Api) -> None:
    error_of(tokenize(api, prompt="a", model="other"), 404, "model")
    error_of(api.http.post("/detokenize", json={"tokens": [1], "model": "other"}), 404, "model")
