"""`Tokenizer`: text and chats to token ids, ids to text. Owns the engine of the `tokenizers` package and its twins.

How a model's files are read is gguf.py's and folder.py's; how a chat is rendered is template.py's.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import tokenizers

from headrace.errors import RequestError
from headrace.paths import cache_home
from headrace.tokenize.facts import Facts
from headrace.tokenize.folder import part, read_folder, steps
from headrace.tokenize.gguf import read_gguf
from headrace.tokenize.lookalikes import Guard, Names, escape, free_characters, guard, mark, strings
from headrace.tokenize.messages import check_text, conversation, plain
from headrace.tokenize.template import ChatTemplate, chat_template

_LONG = 4096
"""Texts of more characters are encoded without holding the interpreter's lock."""

_KEPT = 1 << 14
"""Most pieces that are kept: a text's words recur; all of a large vocabulary would take 23 MB."""

RESERVED = frozenset(
    {"self", "messages", "tools", "add_generation_prompt", "continue_final_message", "parse_special_in_content"}
)
"""Names that no free variable of a template may have: what `Tokenizer.chat` takes itself."""


class Tokenizer:
    """One model's tokenizer. Never changes; safe to be used by several threads."""

    def __init__(self, engine: tokenizers.Tokenizer, facts: Facts) -> None:
        self.facts = facts
        self.vocab_size = facts.size
        """Ids from 0 to below this one are known; the model's logits may be wider."""
        self.bos = facts.bos
        self.eos = facts.eos
        """End of sequence, of turn, of message: as many as the tokenizer's own files name."""
        self.pad = facts.pad
        self.add_bos = facts.bos is not None and facts.bos in facts.prefix
        self.add_eos = bool(facts.suffix)
        self.chat_template = facts.templates.get("default")
        self.fim = facts.fim
        """Fill-in-the-middle tokens: prefix, suffix, middle."""
        self._engine = engine
        added = engine.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self._added_ids = {name: i for i, name in self._added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        """Tokens that are no text: control tokens, and what begins or ends a sequence."""
        self._pieces: dict[int, bytes] = {}
        self._guards: dict[str, Guard] = {}

    @classmethod
    def from_folder(cls, path: Path) -> Self:
        """From tokenizer.json and the files beside it. ModelFileError names the file at fault."""
        return cls(*read_folder(Path(path)))

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], *, cache_dir: Path | None = None, path: object = "GGUF metadata"
    ) -> Self:
        """From a GGUF file's metadata. ModelFileError names `path` and the key at fault.

        What takes long to derive is kept in `cache_dir`, by default `tokenizers` in Headrace's cache folder.
        """
        return cls(*read_gguf(metadata, cache_dir=cache_dir or cache_home() / "tokenizers", path=path))

    # text to ids

    def encode(
        self, text: str, *, parse_special: bool = True, add_bos: bool = True, param: str = "prompt"
    ) -> list[int]:
        """Token ids of a text. RequestError for `param` where it holds half of a surrogate pair.

        `parse_special`: names of control tokens in the text stand for the tokens (fill-in-the-middle needs it);
        otherwise they are text as any other. `add_bos`: what the model's files put around a text is put there, in most
        a BOS or nothing. A text that begins with the BOS by name, parsed, does not get a second one.
        """
        if not isinstance(text, str):
            raise RequestError(f"a prompt must be a string, not {type(text).__name__}", param)
        check_text(text, param)
        ids = _ids(self._engine if parse_special else self._literal, text)
        if not add_bos:
            return ids
        prefix = self.facts.prefix
        return [*(() if prefix and ids[: len(prefix)] == list(prefix) else prefix), *ids, *self.facts.suffix]

    def infill(self, before: str, after: str, *, parse_special: bool = False) -> list[int]:
        """Token ids of a prompt for the text between two others, by the model's fill-in-the-middle tokens: prefix,
        `before`, suffix, `after`, middle (Bavarian et al. 2022, arXiv:2207.14255), and before them what the files put
        before a text. RequestError for "suffix" where the model has no such tokens.

        `parse_special` as for `encode`, but off: nobody needs to write those tokens here.
        """
        if self.fim is None:
            raise RequestError("suffix needs a model with fill-in-the-middle tokens, which this one lacks", "suffix")
        first, second, third = self.fim
        check_text(before, "prompt")
        check_text(after, "suffix")
        engine = self._engine if parse_special else self._literal_inside
        return [*self.facts.prefix, first, *_ids(engine, before), second, *_ids(engine, after), third]

    # ids to text

    def piece(self, token: int) -> bytes:
        """The bytes of one token, maybe parts of a character; a control token's are its name. Empty where no token has
        this id (models have wider logits than tokenizers have tokens)."""
        found = self._pieces.get(token)
        if found is None:
            name = self._added.get(token)
            if name is not None:
                found = name.encode()
            else:
                text = self._engine.id_to_token(token) if 0 <= token < self.vocab_size else None
                found = b"" if text is None else self.facts.spell(text)
            if len(self._pieces) >= _KEPT:
                self._pieces.clear()
            self._pieces[token] = found
        return found

    def added_id(self, name: str) -> int | None:
        """The id of a control token, or of another that is matched whole in texts, by its name; None: there is none."""
        return self._added_ids.get(name)

    def is_special(self, token: int) -> bool:
        return token in self.special_ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of these tokens, control tokens left out or by name.

        Bytes that are no UTF-8 become U+FFFD; a character that the last tokens only begin is left out. Where the
        tokenizer puts a space before a text, the first one is taken off.
        """
        hidden = self.special_ids if skip_special else frozenset()
        data = b"".join([self.piece(i) for i in ids if i not in hidden])
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(data)
        return text.removeprefix(" ") if self.facts.drops_space else text

    # chats

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt as the model's chat template writes it; arguments as for `chat`."""
        template = self._template(tools)
        values = self._values(template, messages, tools, add_generation_prompt, continue_final_message, variables)
        return self._written(template, values, continue_final_message)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        parse_special_in_content: bool = False,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation, written by the model's chat template. BOS and EOS are the template's affair.

        `messages` in OpenAI's form: role, content (text or text parts), tool_calls, and what else the template reads;
        `tools` as JSON schemas; `variables` (documents, enable_thinking, ...) go to the template.
        `continue_final_message`: the prompt ends with the last message's text, for the model to go on;
        `add_generation_prompt` is then off. All that is given is plain text: names of control tokens in it are no
        control tokens, unless `parse_special_in_content`.

        RequestError for "messages", or for the message at fault, where the template refuses them or there is none.
        """
        template = self._template(tools)
        values = self._values(template, messages, tools, add_generation_prompt, continue_final_message, variables)
        if not parse_special_in_content:
            texts = list(strings(values))
            char = next(free_characters([*texts, *template.literals]))
            marked, any_marks = mark(values, self._guard(template), char)
            if any_marks:
                return self._unmarked(self._written(template, marked, continue_final_message), char)
        return _ids(self._engine, self._written(template, values, continue_final_message))

    def _template(self, tools: object) -> ChatTemplate:
        templates = self.facts.templates
        source = templates.get("tool_use") if tools else None
        source = source or self.chat_template
        if source is None:
            raise RequestError("this model has no chat template; it can only complete a text", "messages")
        return chat_template(source)

    def _values(
        self,
        template: ChatTemplate,
        messages: Any,
        tools: Any,
        generate: bool,
        go_on: bool,
        variables: Mapping[str, Any],
    ) -> dict[str, Any]:
        """What the template is given, copied and judged, but for the named tokens."""
        if clash := sorted(RESERVED & variables.keys()):
            raise RequestError(f"{clash[0]} is not a free variable of the template", clash[0])
        values = {name: plain(value, name) for name, value in variables.items()}
        chat = conversation(messages, parts=template.takes_parts)
        if go_on and not isinstance(chat[-1].get("content"), str):
            raise RequestError("continue_final_message needs a last message with a text", "continue_final_message")
        return values | {
            "messages": chat,
            "tools": plain(tools, "tools") if tools is not None else None,
            "documents": values.get("documents"),
            "add_generation_prompt": generate and not go_on,
        }

    def _written(self, template: ChatTemplate, values: Mapping[str, Any], go_on: bool) -> str:
        given = {**self.facts.words, **values}
        return _continued(template, given) if go_on else template.render(given)

    def _guard(self, template: ChatTemplate) -> Guard:
        found = self._guards.get(template.source)
        if found is None:
            found = self._guards[template.source] = guard(self._names, template.literals)
        return found

    def _unmarked(self, text: str, char: str) -> list[int]:
        """Ids of a rendered prompt with marks in it: its control tokens parsed, all text between them as text."""
        found = self._engine.encode(text, add_special_tokens=False)
        ids: list[int] = []
        start = 0
        for token, (begin, end) in zip(found.ids, found.offsets, strict=True):
            if token in self.special_ids:
                ids += self._text_ids(text[start:begin], char, start)
                ids.append(token)
                start = end
        return ids + self._text_ids(text[start:], char, start)

    def _text_ids(self, text: str, char: str, start: int) -> list[int]:
        engine = self._literal if start == 0 else self._literal_inside
        return _ids(engine, text.replace(char, "").replace(escape(char), "")) if text else []

    @cached_property
    def _names(self) -> Names:
        return Names(self._added[i] for i in self.special_ids)

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """The engine's twin, over the same vocabulary, to which names of control tokens are text as any other."""
        return _twin(self._engine)

    @cached_property
    def _literal_inside(self) -> tokenizers.Tokenizer:
        """The same for text that is not the beginning, where that makes a difference."""
        declared = part(self._engine.pre_tokenizer)
        if not any(s["type"] == "Metaspace" and s.get("prepend_scheme") == "first" for s in steps(declared)):
            return self._literal
        twin = _twin(self._engine)
        twin.pre_tokenizer = _pre_tokenizer(_unprefixed(declared))
        return twin


def _ids(engine: tokenizers.Tokenizer, text: str) -> list[int]:
    if len(text) > _LONG:
        return engine.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return engine.encode(text, add_special_tokens=False).ids


def _twin(engine: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Shares the model, which is nearly all of it. That special tokens are encoded as text is a setting of the engine
    that every thread would see, hence two of them."""
    twin = tokenizers.Tokenizer(engine.model)
    twin.normalizer = engine.normalizer
    twin.pre_tokenizer = engine.pre_tokenizer
    added = engine.get_added_tokens_decoder()
    twin.add_tokens([added[i] for i in sorted(added)])
    twin.encode_special_tokens = True
    return twin


def _unprefixed(declared: Mapping[str, Any]) -> dict[str, Any]:
    """A pre-tokenizer, as tokenizer.json has it, with no space in front of a text."""
    if declared["type"] == "Sequence":
        return {**declared, "pretokenizers": [_unprefixed(inner) for inner in declared["pretokenizers"]]}
    return {**declared, "prepend_scheme": "never"} if declared["type"] == "Metaspace" else dict(declared)


def _pre_tokenizer(declared: Mapping[str, Any]) -> Any:
    empty = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}, "pre_tokenizer": declared}
    return tokenizers.Tokenizer.from_str(json.dumps(empty)).pre_tokenizer


def _continued(template: ChatTemplate, values: Mapping[str, Any]) -> str:
    """The prompt up to the end of the last message's text. The end is found by a character put there, with a space
    behind it that tells whether the template trims contents."""
    messages = values["messages"]
    last = messages[-1]["content"]
    tag = next(free_characters([*strings(messages), *strings(values), *template.literals]))
    tagged = [*messages[:-1], {**messages[-1], "content": f"{last}{tag} "}]
    text = template.render({**values, "messages": tagged})
    at = text.rfind(tag)
    if at < 0 or last.strip() not in text:
        raise RequestError(
            "the model's chat template does not keep the end of the last message", "continue_final_message"
        )
    return text[:at] if text.startswith(f"{tag} ", at) else text[:at].rstrip()
