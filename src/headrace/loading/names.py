"""Which tensor of a file fills which weight. Strict: all tensors are used, all weights filled, all shapes right.

The canonical names are those of `program.decoder`. Differences between files end here: fused tensors are cut into
lines, and the rows that llama.cpp reorders for its own rotation are put back.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from headrace.errors import ModelFileError
from headrace.formats import FORMATS
from headrace.loading.configs import ROPE_TENSORS
from headrace.loading.source import Source
from headrace.models.spec import Attention, Spec
from headrace.program.decoder import EMBED, HEAD, NORM

Shape = tuple[int, ...]

GGUF_LAYER = {
    "attn_norm": "attn_norm",
    "attn_q": "attn.q",
    "attn_k": "attn.k",
    "attn_v": "attn.v",
    "attn_qkv": "attn.qkv",
    "attn_q_norm": "attn.q_norm",
    "attn_k_norm": "attn.k_norm",
    "attn_output": "attn.o",
    "post_attention_norm": "attn_post_norm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "ffn.gate",
    "ffn_up": "ffn.up",
    "ffn_down": "ffn.down",
    "post_ffw_norm": "ffn_post_norm",
}
GGUF_MODEL = {"token_embd.weight": EMBED, "output_norm.weight": NORM, "output.weight": HEAD}
GGUF_UNUSED = re.compile(r"blk\.\d+\.attn_rot_embd\.weight")
"""Frequencies that old converters wrote and every reader computes for itself."""

HF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k",
    "self_attn.v_proj": "attn.v",
    "self_attn.qkv_proj": "attn.qkv",
    "self_attn.q_norm": "attn.q_norm",
    "self_attn.k_norm": "attn.k_norm",
    "self_attn.o_proj": "attn.o",
    "pre_feedforward_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn.gate",
    "mlp.up_proj": "ffn.up",
    "mlp.gate_up_proj": "ffn.gate_up",
    "mlp.down_proj": "ffn.down",
    "post_feedforward_layernorm": "ffn_post_norm",
}
"""`post_attention_layernorm` depends on the family: see `_canonical`."""
HF_MODEL = {"embed_tokens.weight": EMBED, "norm.weight": NORM}
HF_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
HF_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
HF_UNUSED = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""A buffer that old transformers saved: computed from the config."""

QK_NORMS = ("attn.q_norm.weight", "attn.k_norm.weight")
"""Norms of queries and keys: both or neither."""

SHOWN = 8
"""Names listed in an error."""


@dataclass(frozen=True, eq=False)
class Part:
    """Where a weight comes from."""

    tensor: str
    """The file's name."""
    shape: Shape
    rows: slice | np.ndarray | None = None
    """Its lines of that tensor, in its own order; None: all as they are."""


def match_names(source: Source, spec: Spec) -> dict[str, Part]:
    """Every weight's place in the file, by canonical name, in the order of the model.

    Raises ModelFileError that lists, by name, tensors nobody uses, weights nobody fills, or both shapes of a tensor
    whose shape is wrong, or the format of one that cannot be read. Biases, norms of queries and keys, and the head are
    taken where the file has them, in every layer or in none. A head: GGUF without one, and safetensors without one
    whose config ties it, use the embedding. One that is in the file is used, tied or not (equal or not, that is what
    transformers does too).
    """
    expected = _expected(spec)
    found: dict[str, Part] = {}
    unknown = []
    for name, info in source.tensors.items():
        if _unused(source.kind, name):
            continue
        canonical = _canonical(source.kind, spec, name)
        parts = None if canonical is None else _cut(spec, source.kind, canonical, info.shape)
        if not parts or not all(key in expected for key, _, _ in parts):
            unknown.append(name)
            continue
        fused = sum(expected[key][0] for key, _, _ in parts)
        whole = (fused, *expected[parts[0][0]][1:])
        if info.shape != whole:
            raise ModelFileError(source.path, f"tensor {name} has the shape {info.shape}: the config asks for {whole}")
        if info.format not in FORMATS:
            known = ", ".join(FORMATS)
            raise ModelFileError(source.path, f"tensor {name} is {info.format}: not supported; known are {known}")
        for key, rows, shape in parts:
            if key in found:
                raise ModelFileError(source.path, f"tensors {found[key].tensor} and {name} both fill {key}")
            found[key] = Part(name, shape, _interleaved(spec, source.kind, key) if rows is None else rows)
    if EMBED not in found and HEAD in found and spec.tied:
        found[EMBED] = found.pop(HEAD)
    roles = {_role(name) for name in found}
    missing = [name for name in expected if name not in found and _needed(spec, name, roles)]
    if unknown or missing:
        raise ModelFileError(source.path, _complaint(unknown, missing))
    return {name: found[name] for name in expected if name in found}


def _expected(spec: Spec) -> dict[str, Shape]:
    """Every weight the model can have, with its shape."""
    width = spec.width
    shapes: dict[str, Shape] = {EMBED: (spec.vocab, width)}
    for layer, block in enumerate(spec.blocks):
        a, hidden = block.attention, block.feed_forward.hidden
        queries, keys = a.heads * a.dim, a.kv_heads * a.dim
        of_layer: dict[str, Shape] = {"attn_norm.weight": (width,)}
        linears = {"attn.q": (queries, width), "attn.k": (keys, width), "attn.v": (keys, width)}
        linears["attn.o"] = (width, queries)
        linears |= {"ffn.gate": (hidden, width), "ffn.up": (hidden, width), "ffn.down": (width, hidden)}
        for name, shape in linears.items():
            of_layer |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        of_layer |= {"attn.q_norm.weight": (a.dim,), "attn.k_norm.weight": (a.dim,), "ffn_norm.weight": (width,)}
        if block.post_norms:
            of_layer |= {"attn_post_norm.weight": (width,), "ffn_post_norm.weight": (width,)}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes | {NORM: (width,), HEAD: (spec.vocab, width)}


def _role(name: str) -> str:
    """What a weight is in its layer, whichever that is; of those in no layer their whole name."""
    return name.split(".", 2)[2] if name.startswith("layers.") else name


def _needed(spec: Spec, name: str, roles: Collection[str]) -> bool:
    """Whether a weight that is not there is missing, where weights of these roles are there in some layer."""
    if name == HEAD:
        return not spec.tied
    role = _role(name)
    if role in QK_NORMS:
        return any(norm in roles for norm in QK_NORMS)
    return role in roles if role.endswith(".bias") else True


def _complaint(unknown: list[str], missing: list[str]) -> str:
    def listed(names: list[str]) -> str:
        return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")

    said = []
    if missing:
        said.append(f"{len(missing)} weights that the config asks for are not in the file: {listed(missing)}")
    if unknown:
        said.append(f"{len(unknown)} tensors of the file have no place in the model: {listed(unknown)}")
    if HEAD in missing:
        said.append("head.weight (lm_head) may only be left out where the config's tie_word_embeddings is true")
    return "; ".join(said)


# ---- names


def _unused(kind: str, name: str) -> bool:
    if kind == "gguf":
        return name in ROPE_TENSORS or GGUF_UNUSED.fullmatch(name) is not None
    return HF_UNUSED.fullmatch(name) is not None


def _canonical(kind: str, spec: Spec, name: str) -> str | None:
    """The canonical name; attn.qkv and ffn.gate_up for fused tensors. None: not known."""
    if kind == "gguf":
        if name in GGUF_MODEL:
            return GGUF_MODEL[name]
        return _of_layer(name, "blk.", GGUF_LAYER)
    if name in HF_HEADS:
        return HEAD
    prefix = next((p for p in HF_PREFIXES if name.startswith(p)), None)
    if prefix is None:
        return None
    name = name.removeprefix(prefix)
    if name in HF_MODEL:
        return HF_MODEL[name]
    after_attention = "attn_post_norm" if spec.blocks[0].post_norms else "ffn_norm"
    return _of_layer(name, "layers.", HF_LAYER | {"post_attention_layernorm": after_attention})


def _of_layer(name: str, prefix: str, table: Mapping[str, str]) -> str | None:
    match = re.fullmatch(re.escape(prefix) + r"(0|[1-9]\d{0,5})\.(.+)\.(weight|bias)", name)
    if match is None or match[2] not in table:
        return None
    return f"layers.{match[1]}.{table[match[2]]}.{match[3]}"


# ---- lines


def _cut(spec: Spec, kind: str, canonical: str, shape: Shape) -> list[tuple[str, slice | None, Shape]]:
    """(weight, its lines, its shape) of everything that a tensor holds; empty where it fits nowhere."""
    match = re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias)", canonical)
    if match is None:
        return [(canonical, None, shape)]
    layer, role, what = int(match[1]), match[2], match[3]
    if layer >= len(spec.blocks):
        return []
    block, at = spec.blocks[layer], f"layers.{layer}."
    a, hidden = block.attention, block.feed_forward.hidden
    if _turns_neighbours(spec, kind) and role in ("attn.qkv", "attn.q_norm", "attn.k_norm"):
        return []
    if role == "attn.qkv":
        sizes = {"attn.q": a.heads * a.dim, "attn.k": a.kv_heads * a.dim, "attn.v": a.kv_heads * a.dim}
    elif role == "ffn.gate_up" or (role == "ffn.up" and kind == "gguf" and shape[:1] == (2 * hidden,)):
        sizes = {"ffn.gate": hidden, "ffn.up": hidden}
    else:
        return [(canonical, None, shape)]
    return [(f"{at}{part}.{what}", lines, (lines.stop - lines.start, *shape[1:])) for part, lines in _stacked(sizes)]


def _stacked(sizes: Mapping[str, int]) -> Iterator[tuple[str, slice]]:
    start = 0
    for name, size in sizes.items():
        yield name, slice(start, start + size)
        start += size


def _turns_neighbours(spec: Spec, kind: str) -> bool:
    """Whether the file's queries and keys are ordered for llama.cpp's rotation of neighbouring channels."""
    return kind == "gguf" and spec.family in ("llama", "mistral")


def _interleaved(spec: Spec, kind: str, canonical: str) -> np.ndarray | None:
    """The order in which the lines of a weight whose shape is right are taken; None: as they are."""
    role = _role(canonical).rsplit(".", 1)[0]
    if not _turns_neighbours(spec, kind) or role not in ("attn.q", "attn.k"):
        return None
    a = spec.blocks[int(canonical.split(".")[1])].attention
    return _rotation_halves(a, a.heads if role == "attn.q" else a.kv_heads)


def _rotation_halves(a: Attention, heads: int) -> np.ndarray:
    """llama.cpp turns neighbouring channels of a llama's head, ours turns channels half a rotation apart: in each head
    first the even, then the odd ones of the channels that turn, then the others as they are."""
    turning = np.arange(a.rope.dim)
    head = np.concatenate((turning[0::2], turning[1::2], np.arange(a.rope.dim, a.dim)))
    return (np.arange(heads)[:, None] * a.dim + head).reshape(-1)
