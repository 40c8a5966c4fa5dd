"""Random and mutated bodies for every endpoint: swapped types, huge and odd numbers, Unicode, deep nesting, cuts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel

from headrace.serve.bodies import ChatBody, CompletionBody
from headrace.serve.embedding import REFUSED as EMBEDDINGS_REFUSED
from headrace.serve.embedding import EmbeddingBody
from headrace.serve.fields import CHAT as CHAT_REFUSED
from headrace.serve.fields import COMPLETIONS as COMPLETIONS_REFUSED
from headrace.serve.fields import IGNORED
from headrace.serve.messages import PARTS, ROLES
from headrace.serve.tokenizing import DETOKENIZE as DETOKENIZE_REFUSED
from headrace.serve.tokenizing import TOKENIZE as TOKENIZE_REFUSED
from headrace.serve.tokenizing import DetokenizeBody, TokenizeBody

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
BODIES: Mapping[str, tuple[type[BaseModel], Mapping[str, Any]]] = {
    CHAT: (ChatBody, CHAT_REFUSED),
    COMPLETIONS: (CompletionBody, COMPLETIONS_REFUSED),
    EMBEDDINGS: (EmbeddingBody, EMBEDDINGS_REFUSED),
    TOKENIZE: (TokenizeBody, TOKENIZE_REFUSED),
    DETOKENIZE: (DetokenizeBody, DETOKENIZE_REFUSED),
}
PATHS = tuple(BODIES)

# fmt: off
SCALARS: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 16, 511, 2**31, 2**63, -(2**64), 10**300, 0.0, -0.0, 0.5, 1.0, 1e-320, 1e308,
    -7.25, "", "x", "hi there", "\x00", "\u2028", "😀", "é" * 50, "<|turn|>", "NaN", "0.7", "user", "assistant", "text",
    "length", "x" * 5000,
]
# fmt: on
NAMES = {
    path: sorted({*body.model_fields, *refused, *IGNORED, "", "foo", "Model"})
    for path, (body, refused) in BODIES.items()
}
ALL_NAMES = sorted({name for names in NAMES.values() for name in names})
GOOD: dict[str, list[Any]] = {
    "n": [1, 2, 3],
    "temperature": [0, 0.5, 1],
    "max_tokens": [1, 4, None],
    "max_completion_tokens": [2, None],
    "stop": ["x", ["a", "MONDAY"], None, []],
    "stream": [True, False],
    "stream_options": [{"include_usage": True}, {}, None],
    "logprobs": [True, False, 0, 1, 5, None],
    "top_logprobs": [0, 2, None],
    "echo": [True, False],
    "logit_bias": [{}, {"5": 1}, {"299": -100.0}],
    "seed": [0, 7, -3],
    "stop_token_ids": [[], [5], [257]],
    "min_tokens": [0, 1],
    "model": [None],
    "suffix": ["", None, "x"],
    "truncate_prompt_tokens": [None, 1, -1, 5],
    "overflow": ["error", "truncate-middle", "sliding", "sinks"],
    "timeout_s": [None, 5, 0.5],
    "parse_special": [True, False],
    "encoding_format": ["float", "base64", None],
    "dimensions": [1, 2, None],
    "pooling": ["mean", "last", None],
    "normalize": [True, False],
    "add_special_tokens": [True, False],
    "return_token_strs": [True, False],
    "add_generation_prompt": [True, False],
    "continue_final_message": [False, True],
    "tools": [[], None, [{"type": "function", "function": {"name": "f", "strict": True}}]],
    "tool_choice": ["auto", "none", "required", None],
    "parallel_tool_calls": [True, False],
    "include_reasoning": [True, False],
}
PLAIN: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "é 😀"}], "max_tokens": 2, "logprobs": True, "top_logprobs": 1},
    COMPLETIONS: {"prompt": "é 😀", "max_tokens": 2, "echo": True, "logprobs": 1, "stop": ["x"]},
    EMBEDDINGS: {"input": ["é 😀", "a"], "encoding_format": "base64", "dimensions": 2, "user": "me"},
    TOKENIZE: {"prompt": "é 😀", "return_token_strs": True, "add_special_tokens": True},
    DETOKENIZE: {"tokens": [1, 2, 3, 257, 299]},
}
"""Bodies that are answered with 200."""


def any_text(rng: random.Random) -> str:
    """Of all planes, line ends and control characters among them; no halves of pairs."""
    ranges = (
        (0, 0x20),
        (0x20, 0x7F),
        (0x80, 0x2FF),
        (0x300, 0x36F),
        (0x2000, 0x206F),
        (0x4E00, 0x9FFF),
        (0x1F300, 0x1FAFF),
    )
    return "".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(rng.choice((1, 3, 30, 300))))


def any_number(rng: random.Random) -> float | int:
    kind = rng.randrange(5)
    if kind == 0:
        return rng.randint(-(10 ** rng.randint(0, 40)), 10 ** rng.randint(0, 40))
    if kind == 1:
        return rng.uniform(-1, 1) * 10.0 ** rng.randint(-320, 307)
    return rng.choice([rng.randint(-3, 600), float(rng.randint(-3, 600)), 2 ** rng.randint(0, 70) - rng.randint(0, 1)])


def any_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if kind < 0.1:
        return any_text(rng)
    if kind < 0.2:
        return any_number(rng)
    if depth > 3 or kind < 0.6:
        return rng.choice(SCALARS)
    if kind < 0.61:
        return nested(rng)
    if kind < 0.8:
        return [any_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    names = [*ALL_NAMES, *map(str, range(5))]
    return {str(rng.choice(names)): any_value(rng, depth + 1) for _ in range(rng.randrange(4))}


def nested(rng: random.Random) -> Any:
    """Lists and objects within one another, more than anybody sends."""
    value: Any = rng.choice(SCALARS)
    for _ in range(rng.choice((10, 70, 400))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def any_message(rng: random.Random) -> Any:
    if rng.random() < 0.1:
        return any_value(rng)
    content: Any = rng.choice(["hi", "", any_text(rng), [{"type": "text", "text": "a"}] * rng.randrange(1, 3)])
    message: dict[str, Any] = {"role": rng.choice([*ROLES, "assistant"]), "content": content}
    if rng.random() < 0.3:
        message[rng.choice(["role", "content", "name", "tool_calls", "tool_call_id", "foo"])] = any_value(rng)
    if rng.random() < 0.1 and isinstance(message["content"], list):
        message["content"].append(rng.choice([any_value(rng), {"type": rng.choice(sorted(PARTS)), "text": "a"}]))
    return message


def any_messages(rng: random.Random) -> Any:
    return [any_message(rng) for _ in range(rng.randrange(4))] if rng.random() < 0.9 else any_value(rng)


def any_prompt(rng: random.Random) -> Any:
    if rng.random() < 0.3:
        return any_value(rng)
    ids = [rng.randrange(300) for _ in range(rng.randrange(1, 9))]
    return rng.choice(["hi", "😀 MON", any_text(rng), ["a", "b"], ids, [ids, [1]], ["", "x"], ids * 200])


def any_tokens(rng: random.Random) -> Any:
    if rng.random() < 0.3:
        return any_value(rng)
    return [rng.choice([rng.randrange(300), rng.randrange(300), any_number(rng)]) for _ in range(rng.randrange(9))]


MAIN: Mapping[str, Mapping[str, Callable[[random.Random], Any]]] = {
    CHAT: {"messages": any_messages},
    COMPLETIONS: {"prompt": any_prompt},
    EMBEDDINGS: {"input": any_prompt},
    TOKENIZE: {"prompt": lambda rng: rng.choice(["hi", any_text(rng), any_value(rng)]), "messages": any_messages},
    DETOKENIZE: {"tokens": any_tokens},
}
"""What each endpoint cannot do without; one of them."""


def any_body(rng: random.Random, path: str, odd: float = 0.5) -> dict[str, Any]:
    """`odd` is how often a field has a value of any kind."""
    body: dict[str, Any] = {}
    if rng.random() < 0.97:
        name, draw = rng.choice(list(MAIN[path].items()))
        body[name] = draw(rng)
    good = [name for name in GOOD if name in BODIES[path][0].model_fields]
    for name in rng.sample(good, min(len(good), rng.randrange(5))):
        body[name] = rng.choice(GOOD[name])
    if rng.random() < odd:
        body[rng.choice(NAMES[path] if rng.random() < 0.9 else ALL_NAMES)] = any_value(rng)
    return body


def mutated(rng: random.Random, raw: bytes) -> bytes:
    data = bytearray(raw)
    for _ in range(rng.randrange(1, 3)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[at : at + rng.randrange(1, 6)]
            case 2:
                data[at:at] = rng.choice(
                    [b'"', b"{", b"]", b"\\ud800", b"NaN", b"1e999", b",", b"\xff", b"[" * 2000, b"null"]
                )
            case 3:
                data[at:at] = data[rng.randrange(len(data) + 1) :][: rng.randrange(30)]
            case 4:
                del data[at:]
    return bytes(data)


def swapped(rng: random.Random, path: str) -> dict[str, Any]:
    """A body that would be answered, but that one field has a value of any kind."""
    body = dict(PLAIN[path])
    body[rng.choice([*body, *BODIES[path][0].model_fields])] = any_value(rng)
    return body


def any_raw(rng: random.Random, path: str, way: str) -> bytes:
    """The bytes of a body in one of `WAYS`."""
    if way in ("values", "good"):
        body = any_body(rng, path, 0.5 if way == "values" else 0)
    elif way == "swapped":
        body = swapped(rng, path)
    else:
        good = {k: rng.choice(GOOD[k]) for k in ("n", "seed") if k in BODIES[path][0].model_fields}
        body = dict(PLAIN[path], **good)
    raw = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    return mutated(rng, raw) if way == "bytes" else raw


WAYS = ("values", "good", "swapped", "bytes")


def problem_with(path: str, status: int, content_type: str, content: bytes) -> str | None:
    """What is wrong with an answer, whatever was asked; None: nothing. A stream may end with an error in it."""
    if status not in (200, 400, 404, 408, 413):
        return f"status {status}"
    if status != 200:
        error = json.loads(content)["error"]
        good = isinstance(error["message"], str) and 0 < len(error["message"]) < 2000
        return None if good else f"the error {error!r:.300}"
    if content_type.startswith("text/event-stream"):
        last = content.removesuffix(b"\n\n").rpartition(b"\n\n")[2]
        return None if last == b"data: [DONE]" or last.startswith(b'data: {"error":') else f"the end {last[-300:]!r}"
    key = {EMBEDDINGS: "data", TOKENIZE: "tokens", DETOKENIZE: "prompt"}.get(path, "choices")
    return None if key in json.loads(content) else f"an answer without {key}"
