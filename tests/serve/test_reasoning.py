"""Thinking told apart from the answer (A6): by the ids of its tags, the same streamed or not."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from headrace.params import Reasoning
from tests.serve.client_checks import client_of
from tests.serve.fake_llm import Script
from tests.serve.http_api import Api, error_of
from tests.serve.test_tools import CALL, TOOLS, calls_of, streamed

TEMPLATE = "{{ tools }} <tool_call> <think> {{ thought }} </think>"


@pytest.fixture(params=["shown", "hidden"])
def tags(api: Api, request: pytest.FixtureRequest) -> list[int]:
    """Ids of the two tags, tokens of text as Qwen's or control tokens as Mistral's."""
    if request.param == "shown":
        return api.llm.tokenizer.learn(TEMPLATE, text=["<think>", "</think>"])
    return api.llm.tokenizer.learn(TEMPLATE, control=["<think>", "</think>"])


def says(api: Api, *parts: str | int) -> None:
    """Texts byte by byte, tags by their ids."""
    tokens = [token for part in parts for token in ([part] if isinstance(part, int) else part.encode())]
    api.llm.script = lambda prompt, choice: Script(tokens)


def told(api: Api, **body: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    """(content, reasoning, calls, finish reason), which are the same streamed."""
    answer = api.chat(**body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    message = choice["message"]
    whole = (
        message["content"] or "",
        message.get("reasoning_content", ""),
        calls_of(message),
        choice["finish_reason"],
    )
    assert streamed(api, **{"tools": None, **body}) == whole
    return whole


def thought(api: Api, **body: Any) -> int:
    usage = api.chat(**body).json()["usage"]
    (last,) = [e for e in api.chat_events(stream_options={"include_usage": True}, **body) if not e["choices"]]
    assert last["usage"]["completion_tokens_details"] == usage["completion_tokens_details"]
    return int(usage["completion_tokens_details"]["reasoning_tokens"])


def test_a6_thinking_and_answer(api: Api, tags: list[int]) -> None:
    begin, end = tags
    says(api, begin, "\nhm é\n", end, "\n\nYes.")
    assert told(api) == ("\n\nYes.", "\nhm é\n", [], "stop")
    assert thought(api) == len("\nhm é\n".encode())


def test_a6_the_template_begins_the_thinking(api: Api, tags: list[int]) -> None:
    begin, end = tags
    api.llm.tokenizer.opens = [begin, 10]
    says(api, "hm", end, "Yes.")
    assert told(api) == ("Yes.", "hm", [], "stop")
    assert thought(api) == 2
    api.llm.tokenizer.opens = [begin, 10, 10, end, 10]
    assert told(api)[1] == "", "it has ended it, too"


def test_no_thinking(api: Api, tags: list[int]) -> None:
    says(api, "Yes.")
    assert told(api) == ("Yes.", "", [], "stop")
    assert api.chat().json()["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert thought(api) == 0


def test_a6_a_quoted_tag_does_not_end_it(api: Api, tags: list[int]) -> None:
    begin, end = tags
    says(api, begin, "the tag `</think>` ends <think>", end, "It is </think>.")
    assert told(api) == ("It is </think>.", "the tag `</think>` ends <think>", [], "stop")


def test_a_later_tag_is_content(api: Api) -> None:
    begin, end = api.llm.tokenizer.learn(TEMPLATE, text=["<think>", "</think>"])
    says(api, "a", begin, "b", end)
    assert told(api) == ("a<think>b</think>", "", [], "stop")


def test_a6_empty_thinking(api: Api, tags: list[int]) -> None:
    begin, end = tags
    says(api, begin, end, "Yes.")
    assert told(api) == ("Yes.", "", [], "stop")
    says(api, begin, end)
    assert told(api) == ("", "", [], "stop")
    assert api.chat().json()["choices"][0]["message"]["content"] == ""


@pytest.mark.parametrize("limit", range(1, 12))
def test_a6_cut_thinking(api: Api, tags: list[int], limit: int) -> None:
    begin, end = tags
    says(api, begin, "abc", end, "defghi")
    content, reasoning, _, finish = told(api, max_tokens=limit)
    assert content == "defghi"[: max(0, limit - 5)]
    assert reasoning == "abc"[: limit - 1]
    assert finish == ("length" if limit < 12 else "stop")
    if not content and reasoning:
        assert api.chat(max_tokens=limit).json()["choices"][0]["message"]["content"] is None


def test_a6_then_a_tool_call(api: Api, tags: list[int]) -> None:
    begin, end = tags
    says(api, begin, f"I could {CALL}", end, f"\n\n{CALL}")
    call = ("get_weather", '{"city": "Bern"}')
    assert told(api, tools=TOOLS) == ("", f"I could {CALL}", [call], "tool_calls")


def test_a6_text_on_both_sides_of_the_tag_that_comes_at_once(api: Api, tags: list[int]) -> None:
    """What looked like a stop string is told in one part: thinking, the tag, and how the answer begins."""
    begin, end = tags
    tag = "" if api.llm.tokenizer.is_special(end) else "</think>"
    says(api, begin, "hm", end, "Yes.")
    for stop in (f"m{tag}Yo", f"hm{tag}Yes!", f"m{tag}Yes.."):
        assert told(api, stop=stop) == ("Yes.", "hm", [], "stop")
    assert told(api, stop=f"m{tag}Ye") == ("", "h", [], "stop")


def test_a6_everything_that_was_generated_is_told(api: Api, tags: list[int]) -> None:
    """Whatever the tokens: thinking and content are the text less the two tags."""
    rng = random.Random(5)
    begin, end = tags
    for _ in range(30):
        inside = bytes(rng.choice(b"a<k/>\n\xc3\xa9\xf0") for _ in range(rng.randint(0, 9)))
        behind = bytes(rng.choice(b"a<k/>\n\xc3\xa9\xf0") for _ in range(rng.randint(0, 9)))
        tokens = [begin, *inside, end, *behind]
        api.llm.script = lambda prompt, choice, tokens=tokens: Script(tokens)
        content, reasoning, _, _ = told(api, skip_special_tokens=False, ignore_eos=True, max_tokens=len(tokens))
        api.llm.tokenizer.facts.templates = {"default": "no thinking here"}
        plain = api.chat(skip_special_tokens=False, ignore_eos=True, max_tokens=len(tokens)).json()
        api.llm.tokenizer.facts.templates = {"default": TEMPLATE}
        text = plain["choices"][0]["message"]["content"]
        assert reasoning + content == text.replace("<think>", "", 1).replace("</think>", "", 1)


def test_log_probabilities_are_of_all_tokens(api: Api, tags: list[int]) -> None:
    begin, end = tags
    says(api, begin, "ab", end, "cd")
    body = {"logprobs": True, "top_logprobs": 0}
    entries = api.chat(**body).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token_id"] for entry in entries][:6] == [begin, 97, 98, end, 99, 100]
    chunks = [c["logprobs"]["content"] for e in api.chat_events(**body) for c in e["choices"] if c["logprobs"]]
    assert [entry for some in chunks for entry in some] == entries
    entries = api.chat(include_reasoning=False, **body).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token_id"] for entry in entries][:2] == [99, 100]


def test_thinking_that_is_not_wanted(api: Api, tags: list[int]) -> None:
    begin, end = tags
    says(api, begin, "hm", end, "Yes.")
    assert told(api, include_reasoning=False) == ("Yes.", "", [], "stop")
    assert thought(api, include_reasoning=False) == 2
    says(api, begin, "hm")
    assert told(api, include_reasoning=False, max_tokens=3) == ("", "", [], "length")


def test_a_stop_string_in_the_thinking(api: Api, tags: list[int]) -> None:
    begin, end = tags
    says(api, begin, "one two", end, "three")
    assert told(api, stop=" tw") == ("", "one", [], "stop")


def test_the_budget(api: Api, tags: list[int]) -> None:
    begin, end = tags
    says(api, begin, "hm", end, "Yes.")
    assert told(api, thinking_token_budget=5)[1] == "hm"
    assert api.llm.submitted[-1][1].reasoning == Reasoning(begin, end, 5, False)
    api.llm.tokenizer.opens = [begin, 10]
    api.chat(thinking_token_budget=0)
    assert api.llm.submitted[-1][1].reasoning == Reasoning(begin, end, 0, True)
    api.chat()
    assert api.llm.submitted[-1][1].reasoning is None, "nothing needs to know"


@pytest.mark.parametrize("budget", [-1, 2**31, 1.5, "5", True])
def test_budgets_that_are_refused(api: Api, budget: Any) -> None:
    api.llm.tokenizer.learn(TEMPLATE, text=["<think>", "</think>"])
    error_of(api.chat(thinking_token_budget=budget), 400, "thinking_token_budget")


def test_a_budget_for_a_model_that_does_not_think(api: Api) -> None:
    error_of(api.chat(thinking_token_budget=5), 400, "thinking_token_budget")
    error_of(api.complete(thinking_token_budget=5), 400, "thinking_token_budget")


def test_tools_are_held_after_the_thinking(api: Api, tags: list[int]) -> None:
    begin, end = tags
    api.chat(tools=TOOLS, tool_choice="required")
    params = api.llm.submitted[-1][1]
    assert params.grammar is not None
    assert params.reasoning == Reasoning(begin, end, None, False)


def test_a6_a_form_is_held_after_the_thinking(api: Api, tags: list[int]) -> None:
    begin, end = tags
    says(api, begin, '{"not yet', end, '{"a": 1}')
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    assert told(api, response_format=form) == ('{"a": 1}', '{"not yet', [], "stop")
    params = api.llm.submitted[-1][1]
    assert params.grammar is not None and params.grammar.kind == "json"
    assert params.reasoning == Reasoning(begin, end, None, False)


def test_continuing_inside_the_thinking(api: Api, tags: list[int]) -> None:
    _, end = tags
    says(api, " on", end, "Yes.")
    for last, expected in (("<think>\nso", (" on", "Yes.")), ("<think>so</think>", ("", " on"))):
        talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": last}]
        content, reasoning, _, _ = told(api, messages=talk, continue_final_message=True)
        assert (reasoning, content[: len(expected[1])]) == expected


def test_thinking_is_taken_back(api: Api) -> None:
    seen: list[Any] = []
    chat = api.llm.tokenizer.chat
    api.llm.tokenizer.chat = lambda messages, **t: (seen.append(messages), chat(messages, **t))[1]  # type: ignore
    try:
        for key in ("reasoning_content", "reasoning"):
            for content, expected in (("Yes.", "Yes."), (None, "")):
                message = {"role": "assistant", "content": content, key: "hm"}
                talk = [{"role": "user", "content": "x"}, message, {"role": "user", "content": "y"}]
                assert api.chat(messages=talk).status_code == 200
                assert seen[-1][1] == {"role": "assistant", "content": expected, "reasoning_content": "hm"}
    finally:
        del api.llm.tokenizer.chat


def test_the_official_client(api: Api, tags: list[int]) -> None:
    begin, end = tags
    says(api, begin, "hm", end, "Yes.")
    client = client_of(api.url)
    how: dict[str, Any] = {"model": "fake-model", "messages": [{"role": "user", "content": "hi"}]}
    whole = client.chat.completions.create(**how)
    assert whole.choices[0].message.model_dump()["reasoning_content"] == "hm"
    assert whole.usage is not None and whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.reasoning_tokens == 2
    parts = [chunk.choices[0].delta for chunk in client.chat.completions.create(**how, stream=True)]
    assert "".join(part.model_dump().get("reasoning_content") or "" for part in parts) == "hm"
    assert "".join(part.content or "" for part in parts) == "Yes."
    assert json.loads(whole.model_dump_json())["choices"][0]["message"]["content"] == "Yes."
