"""The service as an OpenAPI 3.1 document (https://spec.openapis.org/oas/v3.1.0), made from the bodies and the tables of
fields. Ranges that need the model are not in it: a request that fits the document may still be a 400 that names the
field; one that does not fit is one.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from headrace.params import LOGPROBS_MODES, MAX_CHOICES, MAX_LOGPROBS, MAX_STOP_CHARS, MAX_STOPS, OVERFLOWS
from headrace.serve.bodies import ChatBody, CompletionBody
from headrace.serve.deadline import MOST_S
from headrace.serve.embedding import MAX_INPUTS, EmbeddingBody
from headrace.serve.embedding import REFUSED as EMBEDDINGS
from headrace.serve.fields import CACHE_HINT, CHAT, COMPLETIONS, IGNORED, Refused
from headrace.serve.messages import ROLES
from headrace.serve.tokenizing import DETOKENIZE, TOKENIZE, DetokenizeBody, TokenizeBody

Schema = dict[str, Any]


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _list(items: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": items, **limits}


def _object(required: Mapping[str, Schema], **optional: Schema) -> Schema:
    return {"type": "object", "properties": {**required, **optional}, "required": list(required)}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_IDS = _list(_COUNT, minItems=1)
_PROMPTS: Schema = {"anyOf": [_TEXT, _IDS, _list(_TEXT, minItems=1), _list(_IDS, minItems=1)]}
_STOP: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_PART = {**_object({"type": {"const": "text"}, "text": _TEXT}, **{CACHE_HINT: {}}), "additionalProperties": False}
_SAID = [_TEXT, _list(_PART, minItems=1)]
_MESSAGE: Schema = {
    "anyOf": [
        _object({"role": {"enum": list(ROLES)}, "content": {"anyOf": _SAID}}),
        _object({"role": {"const": "tool"}}, content={"anyOf": [*_SAID, {"type": "null"}]}),
    ]
}

_FIELDS: Mapping[str, Schema] = {
    "n": _or_null({"type": "integer", "minimum": 1, "maximum": MAX_CHOICES}),
    "temperature": _or_null({"type": "number", "minimum": 0}),
    "top_p": _or_null({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
    "min_p": _or_null({"type": "number", "minimum": 0, "maximum": 1}),
    "top_k": _or_null({"type": "integer", "minimum": -1}),
    "repetition_penalty": _or_null({"type": "number", "exclusiveMinimum": 0}),
    "presence_penalty": _or_null({"type": "number", "minimum": -2, "maximum": 2}),
    "frequency_penalty": _or_null({"type": "number", "minimum": -2, "maximum": 2}),
    "stop": {"anyOf": [_STOP, _list(_STOP, maxItems=MAX_STOPS), {"type": "null"}]},
    "stop_token_ids": _or_null(_list(_COUNT)),
    "min_tokens": _or_null(_COUNT),
    "top_logprobs": _or_null({"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS}),
    "logprobs_mode": _or_null({"enum": list(LOGPROBS_MODES)}),
    "overflow": _or_null({"enum": list(OVERFLOWS)}),
    "priority": _or_null({"type": "integer", "minimum": -100, "maximum": 100}),
    "timeout_s": _or_null({"type": "number", "exclusiveMinimum": 0, "maximum": MOST_S}),
    "dimensions": _or_null({"type": "integer", "minimum": 1}),
    "prompt": _PROMPTS,
    "input": {
        "anyOf": [
            {**_TEXT, "minLength": 1},
            _IDS,
            _list(_TEXT, minItems=1, maxItems=MAX_INPUTS),
            _list(_IDS, minItems=1),
        ]
    },
    "tokens": _list(_COUNT),
    "messages": _list(_ref("Message"), minItems=1),
}
"""Fields that the models of the bodies say less of than is known without a model; by name, in all bodies."""

_USAGE = _object(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": {"type": "object"},
    }
)
_HEAD = {"id": _TEXT, "object": _TEXT, "created": _COUNT, "model": _TEXT, "system_fingerprint": _TEXT}
_CHOICE = {
    "index": _COUNT,
    "logprobs": _or_null({"type": "object"}),
    "finish_reason": _or_null(_TEXT),
    "stop_reason": {"anyOf": [_TEXT, _COUNT, {"type": "null"}]},
}
_VECTOR = {"anyOf": [_list(_NUMBER), {"type": "string", "contentEncoding": "base64"}]}
_MODEL = _object({"id": _TEXT, "object": _TEXT, "created": _COUNT, "owned_by": _TEXT, "max_model_len": _COUNT})
_SHARED: Mapping[str, Schema] = {
    "Error": _object(
        {"error": _object({"message": _TEXT, "type": _TEXT, "param": _or_null(_TEXT), "code": _or_null(_TEXT)})}
    ),
    "Message": _MESSAGE,
    "Model": _MODEL,
    "Models": _object({"object": _TEXT, "data": _list(_ref("Model"))}),
    "State": _object({"status": _TEXT}),
    "ChatCompletion": _object(
        {**_HEAD, "choices": _list(_object({**_CHOICE, "message": {"type": "object"}})), "usage": _USAGE}
    ),
    "Completion": _object({**_HEAD, "choices": _list(_object({**_CHOICE, "text": _TEXT})), "usage": _USAGE}),
    "Embeddings": _object(
        {
            "object": _TEXT,
            "data": _list(_object({"object": _TEXT, "index": _COUNT, "embedding": _VECTOR})),
            "model": _TEXT,
            "usage": _object({"prompt_tokens": _COUNT, "total_tokens": _COUNT}),
        }
    ),
    "Tokens": _object(
        {"count": _COUNT, "max_model_len": _COUNT, "tokens": _list(_COUNT), "token_strs": _or_null(_list(_TEXT))}
    ),
    "Text": _object({"prompt": _TEXT}),
    "TokenizerInfo": _object(
        {
            "model_max_length": _COUNT,
            "add_bos_token": {"type": "boolean"},
            "add_eos_token": {"type": "boolean"},
            **{name: _or_null(_TEXT) for name in ("bos_token", "eos_token", "pad_token", "chat_template")},
        }
    ),
}

_METRICS: Schema = {"description": "docs/metrics.md", "content": {"text/plain": {"schema": _TEXT}}}
_ERRORS: Mapping[str, str] = {
    "400": "the request cannot be served as it stands; `param` names the field",
    "401": "the server was given API keys, and the request has none of them",
    "404": "no such model",
    "408": "it took longer than `timeout_s`",
    "413": "the body is too large",
    "415": "the body is not JSON, not UTF-8, or compressed",
    "429": "the queue is full, or the API key is over a limit; `Retry-After` says when to come back",
    "500": "the request was accepted and could not be finished",
    "503": "the model is loading, the server is stopping, or the engine has stopped",
}


@dataclass(frozen=True, slots=True)
class _Post:
    """An endpoint that takes a body."""

    path: str
    summary: str
    body: type[BaseModel]
    refused: Mapping[str, Refused]
    answer: str
    streams: bool = False
    own: Mapping[str, Schema] | None = None
    """Fields that mean something else here than in `_FIELDS`."""


_POSTS = (
    _Post("/v1/chat/completions", "Answer a conversation", ChatBody, CHAT, "ChatCompletion", streams=True),
    _Post("/v1/completions", "Continue raw prompts", CompletionBody, COMPLETIONS, "Completion", streams=True),
    _Post("/v1/embeddings", "Vectors of texts", EmbeddingBody, EMBEDDINGS, "Embeddings"),
    _Post(
        "/tokenize",
        "Token ids of a text or a conversation",
        TokenizeBody,
        TOKENIZE,
        "Tokens",
        own={"prompt": _or_null(_TEXT), "messages": _or_null(_list(_ref("Message"), minItems=1))},
    ),
    _Post("/detokenize", "The text of token ids", DetokenizeBody, DETOKENIZE, "Text"),
)


def document(version: str) -> Schema:
    """The whole document; `version` is that of the service."""
    schemas: dict[str, Schema] = dict(copy.deepcopy(dict(_SHARED)))
    paths: dict[str, Schema] = {
        "/live": _get("The process answers", "State"),
        "/health": _get("Ready to answer", "State", "503"),
        "/openapi.json": {
            "get": {"summary": "This document", "responses": {"200": _json("The document", {"type": "object"})}}
        },
        "/metrics": {"get": {"summary": "What Prometheus reads", "responses": {"200": _METRICS, **_failures("401")}}},
        "/v1/models": _get("The models that are served", "Models", "401", "503"),
        "/v1/models/{name}": _one_model(),
        "/tokenizer_info": _get("Names of special tokens, and the chat template", "TokenizerInfo", "401", "503"),
    }
    for post in _POSTS:
        schemas |= _body_schemas(post)
        paths[post.path] = {"post": _post(post)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headrace", "version": version, "description": "OpenAI's API, and more: docs/api.md"},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


def _json(description: str, schema: Schema) -> Schema:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _failures(*statuses: str) -> Schema:
    return {status: _json(_ERRORS[status], _ref("Error")) for status in statuses}


def _get(summary: str, answer: str, *statuses: str) -> Schema:
    return {"get": {"summary": summary, "responses": {"200": _json(summary, _ref(answer)), **_failures(*statuses)}}}


def _one_model() -> Schema:
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    return {**_get("One model", "Model", "401", "404", "503"), "parameters": [name]}


def _post(post: _Post) -> Schema:
    answer = _json(post.summary, _ref(post.answer))
    if post.streams:
        answer["content"]["text/event-stream"] = {}  # OpenAPI 3.1 has no schema for events
    body = {"required": True, "content": {"application/json": {"schema": _ref(post.body.__name__)}}}
    return {"summary": post.summary, "requestBody": body, "responses": {"200": answer, **_failures(*_ERRORS)}}


def _body_schemas(post: _Post) -> dict[str, Schema]:
    """The schema of a body, and those that it names."""
    schema = post.body.model_json_schema(ref_template="#/components/schemas/{model}")
    named: dict[str, Schema] = schema.pop("$defs", {})
    fields = {**_FIELDS, **(post.own or {})}
    for name, known in schema["properties"].items():
        if name in fields:
            schema["properties"][name] = {"description": known["description"], **fields[name]}
    for name, why in IGNORED.items():
        schema["properties"].setdefault(name, {"description": f"ignored: {why}"})
    for name, rule in post.refused.items():
        neutral = {"description": f"refused: {rule.why}", "enum": [None, *rule.neutral]}
        schema["properties"].setdefault(name, neutral)
    return {**named, post.body.__name__: schema}
