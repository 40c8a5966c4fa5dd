"""Which models think, and whether a prompt ends inside the thinking."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.tokenize.thinking import thinking_of
from headrace.tokenize.tokenizer import Tokenizer
from tests.tokenize.made import byte_level

QWEN_3 = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
QWQ = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
TAGS = ("<think>", "</think>")


def small(template: str, tags: tuple[str, ...] = TAGS, **keys: Any) -> Tokenizer:
    controls = ("<|im_start|>", "<|im_end|>", *tags)
    return Tokenizer.from_gguf(byte_level(controls=controls, chat_template=template, **keys))


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_tags_of_the_template_that_are_tokens() -> None:
    thinking = thinking_of(small(QWEN_3))
    assert thinking is not None
    assert (thinking.begin_tag, thinking.end_tag) == TAGS
    magistral = thinking_of(small("{{ '[THINK]' }}", ("[THINK]", "[/THINK]")))
    assert magistral is not None
    assert magistral.end_tag == "[/THINK]"


@pytest.mark.parametrize(
    "tokenizer",
    [
        small("{{ messages[0].content }}"),
        small(QWEN_3, ()),
        small(QWEN_3, ("<think>",)),
        small(QWEN_3, ("[THINK]", "[/THINK]")),
    ],
    ids=["no template for it", "no tokens", "one token", "other tokens"],
)
def test_models_that_do_not_think(tokenizer: Tokenizer) -> None:
    assert thinking_of(tokenizer) is None


@pytest.mark.parametrize(
    ("template", "variables", "begun"),
    [
        (QWEN_3, {}, False),
        (QWEN_3, {"enable_thinking": False}, False),
        (QWQ, {}, True),
        (QWQ, {"add_generation_prompt": False}, False),
    ],
)
def test_where_a_prompt_ends(template: str, variables: dict[str, Any], begun: bool) -> None:
    tokenizer = small(template)
    thinking = thinking_of(tokenizer)
    assert thinking is not None
    for content in ("hi", "<think>", "<think>\n", "x</think>"):
        for special in (False, True):
            prompt = tokenizer.chat(user(content), parse_special_in_content=special, **variables)
            assert thinking.is_begun(prompt, tokenizer) is begun
    assert not thinking.is_begun([], tokenizer)


def test_where_a_text_ends() -> None:
    thinking = thinking_of(small(QWEN_3))
    assert thinking is not None
    assert thinking.is_open_in("<think>\nso far")
    assert not thinking.is_open_in("<think>x</think> so far")
    assert not thinking.is_open_in("so far")
