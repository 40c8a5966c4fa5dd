"""A tokenizer from a folder in the Hugging Face layout: tokenizer.json, tokenizer_config.json, special_tokens_map.json
and the places where chat templates are kept. Reads these files only."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from headrace.errors import ModelFileError
from headrace.tokenize import spelling
from headrace.tokenize.facts import Facts
from headrace.tokenize.gguf import named_fim

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ENDS = ("eos_token", "eot_token", "eom_token")


def read_folder(folder: Path) -> tuple[tokenizers.Tokenizer, Facts]:
    """The tokenizer and what the files say about it.

    ModelFileError, naming the file, where tokenizer.json is missing or a file is broken.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        sentencepiece = " (a tokenizer.model alone cannot be read)" if (folder / "tokenizer.model").exists() else ""
        raise ModelFileError(folder, f"has no tokenizer.json{sentencepiece}; save one with transformers' AutoTokenizer")
    try:
        engine = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise ModelFileError(file, f"is not a tokenizer: {error}") from None
    engine.no_truncation()
    engine.no_padding()
    config = _object(folder / "tokenizer_config.json")
    named = _named_tokens(folder, config)
    _add_missing(engine, config, named)
    spell, drops_space = _spelling(engine, file)
    ids = {name: engine.token_to_id(text) for name, text in named.items()}
    bos = ids.get("bos_token")
    prefix, suffix = _around(engine, config, bos, ids.get("eos_token"))
    return engine, Facts(
        size=1 + max(engine.get_vocab(with_added_tokens=True).values(), default=-1),
        spell=spell,
        bos=bos,
        eos=frozenset(i for name in _ENDS if (i := ids.get(name)) is not None),
        pad=ids.get("pad_token"),
        prefix=prefix,
        suffix=suffix,
        drops_space=drops_space,
        words=named,
        templates=_templates(folder, config),
        fim=named_fim(engine),
    )


def _object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is no such file."""
    if not file.exists():
        return {}
    try:
        value = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(file, f"cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelFileError(file, f"must hold a JSON object, not {type(value).__name__}")
    return value


def _named_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name to text; tokenizer_config.json over special_tokens_map.json, both over `extra_special_tokens`."""
    extra = config.get("extra_special_tokens")
    sources = (extra if isinstance(extra, dict) else {}, _object(folder / "special_tokens_map.json"), config)
    found = {}
    for source in sources:
        for name, value in source.items():
            text = value.get("content") if isinstance(value, dict) else value
            if (name in _NAMED or (name.endswith("_token") and not name.startswith("add_"))) and isinstance(text, str):
                found[name] = text
    return found


def _add_missing(engine: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Adds what tokenizer_config.json calls an added token, or one of the named ones, and tokenizer.json does not."""
    known = {token.content for token in engine.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder")
    missing = []
    for _, entry in sorted(listed.items(), key=lambda item: int(item[0])) if isinstance(listed, dict) else ():
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and entry["content"] not in known:
            flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
            missing.append(
                AddedToken(entry["content"], **{f: entry[f] for f in flags if isinstance(entry.get(f), bool)})
            )
    known |= {token.content for token in missing}
    missing += [
        AddedToken(text, special=True, normalized=False)
        for text in dict.fromkeys(text for name, text in named.items() if name in _NAMED)
        if text not in known
    ]
    if missing:
        engine.add_tokens(missing)


def part(component: Any) -> dict[str, Any]:
    """A component of the pipeline as tokenizer.json has it; empty for None."""
    return {} if component is None else json.loads(component.__getstate__())


def steps(component: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The component itself, or those that it is a sequence of."""
    for key in ("decoders", "pretokenizers", "processors", "normalizers"):
        if component.get("type") == "Sequence" and key in component:
            for inner in component[key]:
                yield from steps(inner)
            return
    if component:
        yield component


def _spelling(engine: tokenizers.Tokenizer, file: Path) -> tuple[Callable[[str], bytes], bool]:
    """What a token's text stands for, and whether a space at the start is dropped, by the declared decoder."""
    found = {step["type"]: step for step in steps(part(engine.decoder))}
    if "ByteLevel" in found:
        return spelling.byte_level, False
    if found.keys() <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and found.keys() & {
        "ByteFallback",
        "Metaspace",
    }:
        strips = found.get("Strip", {}).get("start", 0) > 0
        metaspace = found.get("Metaspace", {"prepend_scheme": "never"}).get("prepend_scheme", "always") != "never"
        return spelling.sentencepiece, strips or metaspace
    raise ModelFileError(
        file, f"has the decoder {'+'.join(found) or 'null'}; byte-level and SentencePiece ones can be read"
    )


def _around(
    engine: tokenizers.Tokenizer, config: Mapping[str, Any], bos: int | None, eos: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids before and after a text: as tokenizer_config.json says in so many words, else as tokenizer.json does it."""
    if "add_bos_token" in config or "add_eos_token" in config:
        return (
            (bos,) if bos is not None and config.get("add_bos_token") is True else (),
            (eos,) if eos is not None and config.get("add_eos_token") is True else (),
        )
    whole, bare = (engine.encode("a", add_special_tokens=add).ids for add in (True, False))
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return tuple(whole[:start]), tuple(whole[start + len(bare) :])
    return (), ()


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name; a file of their own wins over chat_template.json, that over tokenizer_config.json."""
    found = dict(_by_name(folder / "tokenizer_config.json", config.get("chat_template")))
    found |= _by_name(folder / "chat_template.json", _object(folder / "chat_template.json").get("chat_template"))
    others = folder / "additional_chat_templates"
    files = {file.stem: file for file in sorted(others.glob("*.jinja"))}
    if (folder / "chat_template.jinja").exists():
        files["default"] = folder / "chat_template.jinja"
    for name, file in files.items():
        try:
            found[name] = file.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise ModelFileError(file, f"cannot be read: {error}") from None
    return found


def _by_name(file: Path, value: Any) -> dict[str, str]:
    """A template, or a list of named ones."""
    match value:
        case None:
            return {}
        case str():
            return {"default": value}
        case list():
            named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
            if len(named) == len(value) and all(isinstance(x, str) for pair in named.items() for x in pair):
                return named  # type: ignore[return-value]
    raise ModelFileError(file, "chat_template must be a string, or a list of objects with name and template")
