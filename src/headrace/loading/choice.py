"""Which of the files that a repo or a folder lists make up one model. Pure functions over names; nothing is opened."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from headrace.errors import ModelNotFoundError

QUANTS = (
    *("Q4_K_M", "Q4_K_S", "Q4_K", "Q5_K_M", "Q4_1", "Q4_0", "IQ4_XS", "IQ4_NL", "Q5_K_S", "Q5_K", "Q5_1", "Q5_0"),
    *("Q6_K", "Q8_0", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q3_K", "BF16", "F16", "F32", "FP16", "FP32", "Q2_K"),
)
"""GGUF file types in the order in which they are taken where the user names none: small and good first."""

SIDE_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja", "chat_template.json"),
)
"""What a folder in the Hugging Face layout may hold beside its weights, as far as Headrace reads it."""

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_PART = re.compile(r"(?P<stem>.+)-(?P<part>[0-9]{5})-of-(?P<parts>[0-9]{5})(?P<end>\.gguf)", re.IGNORECASE | re.DOTALL)
_NOT_MODELS = re.compile(r"(^|[-_.])(mmproj|imatrix)([-_.]|$)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """One GGUF model: a file, or the parts of a split one."""

    files: tuple[str, ...]
    """In order; the first is the one to open."""
    missing: tuple[str, ...] = ()
    """Parts that the listing lacks."""

    @property
    def name(self) -> str:
        """How it is called in a choice: the file, or the first part."""
        return self.files[0]


@dataclass(frozen=True, slots=True)
class Split:
    """What the name of one part of a split file says."""

    stem: str
    """Common to all parts, with the folder where the name has one."""
    part: int
    """From 1."""
    parts: int
    end: str
    """.gguf, as this file spells it."""

    def name(self, part: int) -> str:
        """Of that part."""
        return f"{self.stem}-{part:05}-of-{self.parts:05}{self.end}"


def split(name: str) -> Split | None:
    """None where the name is not that of a part: `...-00001-of-0000N.gguf`, in any case."""
    found = _PART.fullmatch(name)
    return Split(found["stem"], int(found["part"]), int(found["parts"]), found["end"]) if found else None


def safe(name: str) -> bool:
    """Whether a file name out of a listing stays inside its folder: relative, no `..`, no backslash, no control."""
    parts = name.split("/")
    return not ("\\" in name or any(ord(c) < 32 for c in name) or any(p in ("", ".", "..") for p in parts))


def gguf_models(names: Iterable[str]) -> list[GGUFModel]:
    """The GGUF models among the files, parts put together, by name. Projectors and importance matrices are none."""
    models, splits = [], dict[tuple[str, int], list[Split]]()
    for name in sorted(names):
        base = PurePosixPath(name).name
        if not name.lower().endswith(".gguf") or _NOT_MODELS.search(base.removesuffix(".gguf")):
            continue
        if part := split(name):
            splits.setdefault((part.stem, part.parts), []).append(part)
        else:
            models.append(GGUFModel((name,)))
    for (_, count), parts in splits.items():
        there = {part.part: part.name(part.part) for part in parts}
        gone = (i for i in range(1, min(count, 999) + 1) if i not in there)
        models.append(GGUFModel(tuple(there[i] for i in sorted(there)), tuple(parts[0].name(i) for i in gone)))
    return sorted(models, key=lambda m: m.name)


def first_part(name: str) -> str:
    """The name of the first part of a split file, given any part; any other name as it is."""
    part = split(name)
    return part.name(1) if part else name


def choose_gguf(models: Sequence[GGUFModel], want: str | None, place: str) -> GGUFModel:
    """The model that `want` means, a file name or a file type such as Q4_K_M, in any case; None: the best of QUANTS.

    ModelNotFoundError lists what there is where nothing or more than one fits, and names the missing parts of a split
    file. `place` is what the message calls the repo or folder.
    """
    fitting = _fitting(models, want)
    if not fitting:
        raise ModelNotFoundError(
            f"{place} has no file or type {want!r}; " + listing(models)
            if want
            else f"{place} has no GGUF file of a type that Headrace reads; name one; " + listing(models)
        )
    if len(fitting) > 1:
        hint = f"{want!r} fits several files of {place}" if want else f"{place} has several models"
        raise ModelNotFoundError(f"{hint}; name one of: {', '.join(m.name for m in fitting)}")
    if fitting[0].missing:
        raise ModelNotFoundError(f"{place} lacks a part of {fitting[0].name}: {', '.join(fitting[0].missing[:3])}")
    return fitting[0]


def _fitting(models: Sequence[GGUFModel], want: str | None) -> list[GGUFModel]:
    if want is None:
        if len(models) == 1:
            return list(models)
        ranked = ([m for m in models if _has_type(m.name, quant)] for quant in QUANTS)
        return next((found for found in ranked if found), [])
    low = want.lower()
    for names in (_paths, _base_names):
        if found := [m for m in models if low in names(m)]:
            return found
    return [m for m in models if _has_type(m.name, want)]


def _paths(model: GGUFModel) -> set[str]:
    return {form for f in model.files for form in (f.lower(), f.lower().removesuffix(".gguf"))}


def _base_names(model: GGUFModel) -> set[str]:
    return {PurePosixPath(path).name for path in _paths(model)}


def _has_type(name: str, quant: str) -> bool:
    """Whether the name holds the type as a word of its own: Q4_K is not in Q4_K_M."""
    return re.search(rf"(?<![a-z0-9]){re.escape(quant)}(?![a-z0-9_])", name, re.IGNORECASE) is not None


def listing(models: Sequence[GGUFModel]) -> str:
    """For messages."""
    if not models:
        return "it has no GGUF file"
    shown = ", ".join(m.name for m in models[:20])
    return f"it has: {shown}" + (f" and {len(models) - 20} more" if len(models) > 20 else "")


def is_folder_model(names: Collection[str]) -> bool:
    """Whether the files are a model in the Hugging Face layout: config.json and safetensors at the top."""
    return "config.json" in names and bool(safetensors(names))


def safetensors(names: Collection[str]) -> list[str]:
    """The weights at the top of a listing where no index is to be asked: `model.safetensors` alone if it is there,
    else all but the copies in other layouts (consolidated*) and adapters."""
    if SINGLE in names:
        return [SINGLE]
    found = sorted(n for n in names if n.endswith(".safetensors") and "/" not in n)
    return [n for n in found if not n.startswith(("consolidated", "adapter_"))]


def needs_index(names: Collection[str]) -> bool:
    """Whether the index says which files hold the weights."""
    return SINGLE not in names and INDEX in names
