"""A checkpoint, opened: everything about a model that comes from its files. Opening reads headers, not weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ModelFileError, RequestError
from headrace.formats.format import Format
from headrace.loading.bounded_json import read_json_object
from headrace.loading.choice import split
from headrace.loading.configs import folder_config, gguf_config
from headrace.loading.gguf import GGUF
from headrace.loading.mapped import Budget
from headrace.loading.names import Part, match_names
from headrace.loading.safetensors import Safetensors
from headrace.loading.source import Source
from headrace.models.facts import ConfigFacts
from headrace.models.registry import family
from headrace.models.spec import Spec
from headrace.params import SamplingParams
from headrace.tokenize.tokenizer import Tokenizer

GENERATION_FILE = "generation_config.json"


@dataclass(frozen=True)
class GenerationDefaults:
    """What the model's makers suggest (generation_config.json, general.sampling.* in GGUF); None: they say nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True)
class Checkpoint:
    """Facts of one model."""

    path: Path
    name: str
    """What the model is called where nobody said otherwise: the file's stem or the folder's name."""
    source: Source
    config: Mapping[str, Any]
    """In Hugging Face's words, also for GGUF."""
    spec: Spec
    parts: Mapping[str, Part]
    """Where each weight is, by canonical name: what `write_program` is given."""
    tokenizer: Tokenizer
    generation: GenerationDefaults
    eos: frozenset[int]
    """Every token that ends an answer: the union of what tokenizer, config and generation config name."""
    pooling: str | None = None
    """How its makers pool hidden states to embeddings, `mean` or `last`; None: they say nothing, or something else."""


def open_checkpoint(path: Path, *, cache_dir: Path | None = None) -> Checkpoint:
    """Open a .gguf file or a folder in the Hugging Face layout. `cache_dir` may keep a tokenizer built from GGUF.

    Raises ModelFileError, with the path and what is wrong, for files that are broken or that cannot be run.
    """
    if path.is_dir():
        source: Source = Safetensors(path)
        name = path.resolve().name
    else:
        source = GGUF(path)
        part = split(path.name)
        name = path.stem if part is None else part.stem
    try:
        return _open(path, name, source, cache_dir)
    except BaseException:
        source.close()
        raise


def load_weights(checkpoint: Checkpoint) -> dict[str, Format]:
    """Every weight by canonical name, as stored: views of the mapped files, but for the few whose lines are reordered.

    Nothing is decoded here; a backend does that when it takes the weights over.
    """
    weights = {}
    for name, part in checkpoint.parts.items():
        tensor = checkpoint.source.read(part.tensor)
        weights[name] = tensor if part.rows is None else tensor.shard(part.rows)
    return weights


def _open(path: Path, name: str, source: Source, cache_dir: Path | None) -> Checkpoint:
    suggested: Mapping[str, Any] = {}
    try:
        if source.kind == "gguf":
            config: Mapping[str, Any] = gguf_config(source)
        else:
            config = folder_config(source)
            if (path / GENERATION_FILE).exists():
                suggested = read_json_object(path / GENERATION_FILE, Budget())
        text_config = ConfigFacts(config).mapping("text_config") or {}
        spec = family(config)
    except ValueError as error:
        raise ModelFileError(path, str(error)) from error
    parts = match_names(source, spec)
    if source.kind == "gguf":
        tokenizer = Tokenizer.from_gguf(source.metadata, cache_dir=cache_dir, path=path)
        generation = _defaults(path, source.metadata, GGUF_SAMPLING)
    else:
        tokenizer = Tokenizer.from_folder(path)
        generation = _defaults(path, suggested, HF_SAMPLING)
    named = [*_ids(path, config), *_ids(path, text_config), *_ids(path, suggested)]
    eos = tokenizer.eos | set(named)
    return Checkpoint(path, name, source, config, spec, parts, tokenizer, generation, eos, _pooling(path, source))


POOLING_FILE = Path("1_Pooling") / "config.json"
"""Beside the weights of models made for sentence-transformers."""
GGUF_POOLING = {1: "mean", 3: "last"}
"""`<architecture>.pooling_type` as llama.cpp numbers it, those that are served."""


def _pooling(path: Path, source: Source) -> str | None:
    if source.kind == "gguf":
        kind = source.metadata.get(f"{source.metadata.get('general.architecture')}.pooling_type")
        return GGUF_POOLING.get(kind) if isinstance(kind, int) else None
    if not (path / POOLING_FILE).exists():
        return None
    given = read_json_object(path / POOLING_FILE, Budget())
    keys = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}
    modes = [mode for key, mode in keys.items() if given.get(key) is True]
    return modes[0] if len(modes) == 1 else None


HF_SAMPLING = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
GGUF_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def _defaults(path: Path, facts: Mapping[str, Any], keys: Mapping[str, str]) -> GenerationDefaults:
    """What is suggested, judged as a request's own values would be."""
    given: dict[str, Any] = {name: facts.get(key) for name, key in keys.items()}
    try:
        judged = SamplingParams(**given)
    except RequestError as error:
        raise ModelFileError(
            path, f"the suggested sampling is not usable: {error} ({keys[error.param or '']})"
        ) from error
    return GenerationDefaults(**{name: judged.__dict__[name] for name in given})


def _ids(path: Path, config: Mapping[str, Any]) -> Iterable[int]:
    """eos_token_id: absent, one id or a list of them."""
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ModelFileError(path, f"eos_token_id is {value!r}: must be a token id or a list of token ids")
    return ids
