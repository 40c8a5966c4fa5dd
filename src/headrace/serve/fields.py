"""The fields of a body that are no parameters here: which are ignored because they cannot change the answer, and which
are refused by name. The supported ones are the fields of `bodies`. docs/api.md is checked against these tables.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import RequestError
from headrace.serve.reading import QUOTED


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that is not served."""

    why: str
    """What stands in its way, or what to use instead."""
    neutral: tuple[Any, ...] = ()
    """Values that ask for nothing, accepted as null always is."""


NOT_YET = "not supported yet"

CACHE_HINT = "cache_control"
"""With this some clients mark a prefix that is worth keeping. Ignored in a body, a message, a content part and a tool:
the prefix cache finds by itself what requests share, and no answer depends on it."""

IGNORED: Mapping[str, str] = {
    "user": "whom the request is for; nothing is kept per user",
    "safety_identifier": "as `user`",
    "metadata": "labels of the client; nothing is stored",
    "store": "nothing is ever stored",
    "service_tier": "there is one tier",
    "prompt_cache_key": "a hint for the speed only",
    "prompt_cache_retention": "a hint for the speed only",
    "prediction": "a hint for the speed only",
    CACHE_HINT: "a hint for the speed only; in messages, their parts and tools, too",
}
"""Accepted with any value and without effect, in every body: field to the reason why that is harmless."""

_BOTH: Mapping[str, Refused] = {
    "guided_json": Refused("use structured_outputs.json"),
    "guided_regex": Refused("use structured_outputs.regex"),
    "guided_choice": Refused("use structured_outputs.choice"),
    "guided_grammar": Refused("use structured_outputs.grammar"),
    "grammar": Refused("use structured_outputs.grammar"),
    "json_schema": Refused("use response_format"),
    "use_beam_search": Refused("not supported", (False,)),
    "length_penalty": Refused("it belongs to beam search, which is not supported", (1, 1.0)),
    "early_stopping": Refused("it belongs to beam search, which is not supported", (False,)),
    "bad_words": Refused("use logit_bias", ([],)),
    "allowed_token_ids": Refused("use logit_bias"),
    "prompt_logprobs": Refused("use echo with logprobs in /v1/completions"),
    "add_special_tokens": Refused("beginning-of-sequence tokens are added as the model's file says"),
    "spaces_between_special_tokens": Refused("not supported", (True,)),
    "return_tokens_as_token_ids": Refused("each entry of chat logprobs has token_id", (False,)),
    "return_token_ids": Refused(NOT_YET, (False,)),
    "typical_p": Refused("not supported", (1, 1.0)),
    "mirostat": Refused("not supported", (0,)),
    "n_predict": Refused("use max_tokens"),
    "max_new_tokens": Refused("use max_tokens"),
    "max_output_tokens": Refused("use max_tokens"),
}

CHAT: Mapping[str, Refused] = {
    "functions": Refused("use tools", ([],)),
    "function_call": Refused("use tool_choice", ("none", "auto")),
    "thinking_budget": Refused("use thinking_token_budget"),
    "reasoning_format": Refused("thinking is told as reasoning_content; see include_reasoning"),
    "modalities": Refused("answers are text only", (["text"],)),
    "audio": Refused("answers are text only"),
    "web_search_options": Refused("there is no web search"),
    "reasoning_effort": Refused("give what the model's template knows in chat_template_kwargs"),
    "verbosity": Refused("give what the model's template knows in chat_template_kwargs"),
    "documents": Refused("give what the model's template knows in chat_template_kwargs"),
    "chat_template": Refused("the model's own template is used"),
    "echo": Refused("only in /v1/completions", (False,)),
    "prompt": Refused("send messages, or use /v1/completions"),
    "best_of": Refused("not supported; use n", (1,)),
    **_BOTH,
}
"""What /v1/chat/completions refuses."""

COMPLETIONS: Mapping[str, Refused] = {
    "best_of": Refused("only the same as n (1 where n is not given) is taken; choices are not ranked"),
    "messages": Refused("send prompt, or use /v1/chat/completions"),
    "max_completion_tokens": Refused("use max_tokens"),
    "top_logprobs": Refused("here logprobs is the number of alternatives"),
    "tools": Refused("only in chats", ([],)),
    "tool_choice": Refused("only in chats", ("none", "auto")),
    "parallel_tool_calls": Refused("only in chats", (False, True)),
    "prompt_embeds": Refused("not supported"),
    **_BOTH,
}
"""What /v1/completions refuses. `best_of` equal to `n` asks for nothing and is accepted by `sift`."""


def sift(body: Mapping[str, Any], supported: Collection[str], refused: Mapping[str, Refused]) -> dict[str, Any]:
    """The supported fields of a body. RequestError names the first field that cannot be honoured."""
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if name in supported:
            kept[name] = value
        elif name in refused:
            if not _asks_nothing(name, value, refused[name], body):
                raise RequestError(f"{name} is refused: {refused[name].why}", name)
        elif name not in IGNORED:
            quoted = name[:QUOTED]
            near = difflib.get_close_matches(quoted, [*supported, *refused], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise RequestError(f"there is no field {quoted!r}{hint}", quoted)
    return kept


def _asks_nothing(name: str, value: Any, refused: Refused, body: Mapping[str, Any]) -> bool:
    if value is None:
        return True
    if name == "best_of" and _same(value, body.get("n") or 1):
        return True
    return any(_same(value, neutral) for neutral in refused.neutral)


def _same(value: Any, other: Any) -> bool:
    """Equal as JSON: true is not 1."""
    return type(value) is type(other) and bool(value == other)
