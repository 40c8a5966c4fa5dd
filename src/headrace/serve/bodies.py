"""The bodies of the two generating endpoints, and how their fields become `SamplingParams`.

Types are judged here, strictly ("0.7" is no number, true is no number, 4.0 is no whole number); ranges by
`SamplingParams`; what needs the model by the engine. Each refusal names the field as the client spelled it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.errors import RequestError
from headrace.params import MAX_CHOICES, SamplingParams
from headrace.serve.fields import CHAT, COMPLETIONS, sift
from headrace.serve.reading import QUOTED, check_keys, quoted
from headrace.serve.rendering import check_ends
from headrace.serve.structured import Form, form_of

COMPLETION_TOKENS = 16
"""`max_tokens` of a completion that does not name it, as OpenAI's; fewer where the context holds fewer."""

MAX_IDS = 2**18
"""Most entries of `logit_bias`, and of `stop_token_ids`, over all choices of a request: as many as the largest
vocabularies have. Each choice holds its own, and judging them holds up the event loop."""


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Body(BaseModel):
    """What both endpoints take. null is the same as leaving a field out, but for a completion's max_tokens."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = Field(None, description="a name from /v1/models; without it the model that is served")
    n: int | None = Field(None, description="choices per prompt, 1 to 128; default 1")
    temperature: float | None = Field(None, description="0 or more; 0 (and anything below 1e-5) is greedy")
    top_p: float | None = Field(None, description="above 0, at most 1")
    top_k: int | None = Field(None, description="extra; the k likeliest tokens, 0 and -1 are off")
    min_p: float | None = Field(None, description="extra; 0 to 1, a share of the likeliest token's probability")
    repetition_penalty: float | None = Field(None, description="extra; above 0, over prompt and answer")
    presence_penalty: float | None = Field(None, description="-2 to 2, over the answer; default 0")
    frequency_penalty: float | None = Field(None, description="-2 to 2, over the answer; default 0")
    logit_bias: dict[str, float] | None = Field(None, description="token id to a number from -100 to 100")
    seed: int | None = Field(None, description="signed 64-bit; the seed used is reported as `seed` in each choice")
    stop: Any = Field(
        None,
        description="one string or up to 16, none empty, each of at most 4,096 characters; the earliest match wins",
    )
    stop_token_ids: list[int] | None = Field(None, description="extra; token ids that end the answer")
    include_stop_str_in_output: bool | None = Field(None, description="extra; keep the stop string; default false")
    ignore_eos: bool | None = Field(None, description="extra; go on past the model's own end tokens; default false")
    min_tokens: int | None = Field(None, description="extra; no end before that many tokens; default 0")
    skip_special_tokens: bool | None = Field(
        None, description="extra; leave control tokens out of the text; default true"
    )
    logprobs_mode: Literal["raw", "processed"] | None = Field(
        None,
        description="extra; `raw` (default: the model's own) or `processed` (after penalties, bias and temperature)",
    )
    overflow: str | None = Field(
        None,
        description="extra; of a text longer than the context: `error` (default), `truncate-middle`, `sliding` or "
        "`sinks`; docs/techniques/long-texts.md",
    )
    response_format: Any = Field(
        None,
        description="what the answer must be: `text` (default), `json_object`, or `json_schema` with a schema",
    )
    structured_outputs: Any = Field(
        None, description="extra; the same by one of `json`, `json_object`, `regex`, `choice`, `grammar`"
    )
    cache_salt: str | None = Field(
        None, description="extra; share cached prefixes only with requests of the same salt, up to 256 characters"
    )
    priority: int | None = Field(
        None,
        description="extra; -100 to 100, default 0: a higher one goes before others, within bounds, and what it leaves "
        "in the prefix cache stays longer",
    )
    truncate_prompt_tokens: int | None = Field(
        None,
        description="extra; read only so many of the prompt's last tokens; -1: as many as the context holds beside "
        "max_tokens; not with overflow",
    )
    timeout_s: float | None = Field(
        None, description="extra; seconds after which the request is ended, above 0, at most 86,400; see Timeouts"
    )
    stream: bool | None = Field(None, description="answer in server-sent events; default false")
    stream_options: StreamOptions | None = Field(
        None,
        description="only with stream; `include_usage`: one more chunk with the usage before the end; "
        "`include_obfuscation` only false",
    )

    @cached_property
    def form(self) -> Form | None:
        """What the answer must be. RequestError names the key at fault."""
        return form_of(self.response_format, self.structured_outputs)

    def judge_ids(self, prompts: int) -> None:
        """RequestError where so many prompts are too many for the token ids that come with each."""
        choices = prompts * min(max(self.n or 1, 1), MAX_CHOICES)
        for name in ("logit_bias", "stop_token_ids"):
            _judge_count(name, getattr(self, name), choices)

    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatBody(_Body):
    """POST /v1/chat/completions."""

    messages: list[Any] = Field(description="the conversation, at least one message; see below")
    max_completion_tokens: int | None = Field(
        None, description="most tokens of the answer; default: what the context holds"
    )
    max_tokens: int | None = Field(
        None, description="older name of max_completion_tokens; both only with the same value"
    )
    logprobs: bool | None = Field(None, description="report log-probabilities of the answer's tokens; default false")
    top_logprobs: int | None = Field(
        None, description="0 to 100 of the likeliest tokens, with logprobs true; default 0"
    )
    parse_special: bool | None = Field(
        None, description="extra; let names of control tokens in contents become control tokens; default false"
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="extra; end the prompt where the assistant's turn begins; default: unless continue_final_message",
    )
    continue_final_message: bool | None = Field(
        None, description="extra; go on with the last message, which must be the assistant's; default false"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="extra; variables of the model's chat template"
    )
    tools: list[Any] | None = Field(None, description="functions that the model may call, up to 128; see Tools")
    tool_choice: Any = Field(None, description="`auto` (default), `none`, `required`, or a function by name; see Tools")
    parallel_tool_calls: bool | None = Field(None, description="may an answer have several calls; default true")
    include_reasoning: bool | None = Field(
        None, description="extra; tell what a model thinks before it answers; default true; see Reasoning"
    )
    thinking_token_budget: int | None = Field(
        None, description="extra; most tokens of thinking, 0 or more; then it is ended; only for models that think"
    )

    def params(self) -> SamplingParams:
        """RequestError names the field, in this endpoint's words."""
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise RequestError(
                f"max_tokens ({self.max_tokens}) and max_completion_tokens ({self.max_completion_tokens}) name the "
                "same limit: give one of them",
                "max_completion_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs true", "top_logprobs")
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if limit == 0:
            raise RequestError(f"{self.names()['max_tokens']} must be at least 1", self.names()["max_tokens"])
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return _sampling(self, self.names(), max_tokens=limit, logprobs=logprobs)

    def names(self) -> Mapping[str, str]:
        """What the client calls the parameters that have another name inside."""
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        of_form = {"grammar": "tools"} | _form_name(self)
        return {"max_tokens": limit, "logprobs": "top_logprobs", "prompt": "messages", **of_form}


class CompletionBody(_Body):
    """POST /v1/completions."""

    prompt: Any = Field(description="a string, token ids, or a list of strings or of lists of token ids")
    max_tokens: int | None = Field(
        None, description="most tokens of the answer; default 16; null: what the context holds; 0 only with echo"
    )
    suffix: str | None = Field(
        None,
        description="what follows the answer: fill-in-the-middle, on models that have tokens for it; only with text "
        "prompts, without echo, overflow and truncate_prompt_tokens",
    )
    echo: bool | None = Field(None, description="begin the text with the prompt; default false")
    logprobs: int | None = Field(None, description="0 to 100 alternatives besides each token's own log-probability")
    parse_special: bool | None = Field(
        None,
        description="extra; names of control tokens in a text prompt become control tokens; default: unless suffix",
    )

    def params(self, room: int) -> SamplingParams:
        """For a prompt that leaves `room` tokens of the context. RequestError names the field."""
        limit = self.max_tokens
        if "max_tokens" not in self.model_fields_set:
            limit = max(min(COMPLETION_TOKENS, room), 1)
        if limit == 0 and not self.echo:
            raise RequestError("max_tokens must be at least 1 (0 only with echo)", "max_tokens")
        of_prompt = self.logprobs if self.echo else None
        if limit == 0 and of_prompt is None:
            of_prompt = 0  # what makes the engine run the prompt and nothing else; not shown
        return _sampling(self, self.names(), max_tokens=limit, logprobs=self.logprobs, prompt_logprobs=of_prompt)

    def names(self) -> Mapping[str, str]:
        """What the client calls the parameters that have another name inside."""
        of_prompt = "max_tokens" if self.logprobs is None else "logprobs"  # an echo alone asks for 0 of them too
        return {"prompt_logprobs": of_prompt, **_form_name(self)}


B = TypeVar("B", bound=BaseModel)
G = TypeVar("G", ChatBody, CompletionBody)


def chat_body(body: Mapping[str, Any]) -> ChatBody:
    """RequestError names the field at fault."""
    parsed = _generating(ChatBody, sift(body, ChatBody.model_fields, CHAT))
    parsed.judge_ids(1)
    check_ends(parsed)
    return parsed


def completion_body(body: Mapping[str, Any]) -> CompletionBody:
    """RequestError names the field at fault."""
    parsed = _generating(CompletionBody, sift(body, CompletionBody.model_fields, COMPLETIONS))
    if parsed.suffix:
        for name in ("echo", "overflow", "truncate_prompt_tokens"):
            if getattr(parsed, name):
                raise RequestError(f"{name} cannot be combined with suffix", name)
    return parsed


def validated(kind: type[B], fields: Mapping[str, Any]) -> B:
    """A body of the fields that its endpoint supports. RequestError names the field at fault."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        param = _path(first["loc"])
        if first["type"] == "missing":
            raise RequestError(f"{param} is missing", param) from None
        said = first["msg"][:1].lower() + first["msg"][1:]
        raise RequestError(f"{param}: {said}, not {quoted(first['input'])}", param) from None


def _judge_count(name: str, ids: Any, choices: int = 1) -> None:
    if isinstance(ids, list | dict) and len(ids) * choices > MAX_IDS:
        each = f" for each of {choices} choices" if choices > 1 else ""
        raise RequestError(
            f"{name} has {len(ids)} entries{each}; in one request they are at most {MAX_IDS} together", name
        )


def _generating(kind: type[G], fields: Mapping[str, Any]) -> G:
    for name in ("logit_bias", "stop_token_ids"):
        _judge_count(name, fields.get(name))
    if isinstance(options := fields.get("stream_options"), dict):
        check_keys(options, "stream_options", *StreamOptions.model_fields)
    parsed = validated(kind, fields)
    if parsed.stream_options is not None:
        if not parsed.stream:
            raise RequestError("stream_options needs stream true", "stream_options")
        if parsed.stream_options.include_obfuscation:
            raise RequestError("include_obfuscation is not supported", "stream_options.include_obfuscation")
    return parsed


def _path(loc: tuple[int | str, ...]) -> str:
    """The field at fault: "seed", "stop_token_ids[2]", "logit_bias.5", "stream_options.include_usage"."""
    path = str(loc[0])
    for part in loc[1:]:
        path += f"[{part}]" if isinstance(part, int) else f".{part[:QUOTED]}"
    return path


_AS_THEY_ARE = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "logprobs_mode",
    "overflow",
    "truncate_prompt_tokens",
    "cache_salt",
    "priority",
)
"""Fields of a body that are parameters under the same name."""


def _form_name(body: _Body) -> dict[str, str]:
    return {} if body.form is None else {"grammar": body.form.name}


def _sampling(body: _Body, names: Mapping[str, str], **others: int | None) -> SamplingParams:
    given: dict[str, Any] = {name: getattr(body, name) for name in _AS_THEY_ARE}
    given |= others
    given["grammar"] = None if body.form is None else body.form.grammar
    with_names = {name: value for name, value in given.items() if value is not None}
    try:
        return SamplingParams(**with_names)
    except RequestError as error:
        raise renamed(error, names) from None


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The same refusal in the words of the client; sentences about the prompt and the grammar stay as they are."""
    param, dot, rest = (error.param or "").partition(".")
    if param not in names:
        return error
    name, text = names[param], str(error)
    if param not in ("prompt", "grammar"):
        text = re.sub(rf"(?<![\w.]){re.escape(param)}(?!\w)", name, text)
    return RequestError(text if param != "grammar" else f"{name}{dot}{rest}: {text}", f"{name}{dot}{rest}")
