"""`headrace show`: what a model is and what it will need, from its headers alone; no weight is read."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.console import bars, out, size
from headrace.cli.options import MODEL
from headrace.cli.plan import plan_facts, plan_lines
from headrace.cli.run import TEMPERATURE

if TYPE_CHECKING:
    from headrace.engine.build import Blueprint
    from headrace.loading.checkpoint import Checkpoint

HEAD = 5
"""Lines of the chat template that are shown to people."""


def show(
    model: MODEL,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, the whole chat template in it.")
    ] = False,
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels",
            help="Show which kernel serves each operation and number format here, and why. With --json: as well.",
        ),
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Show where the memory would go, and what past load proposes.")
    ] = False,
    *,
    engine: dict[str, Any],
) -> None:
    """Show a model's architecture, number formats, chat template, defaults, and the memory it will need.

    Downloads the model where it is not here yet. Engine options are taken into account.
    """
    from headrace.config import Options
    from headrace.engine.build import plan_engine
    from headrace.loading.resolve import resolve

    with bars() as progress:
        path = resolve(model, progress=progress)
    blueprint = plan_engine(path, Options.of(**engine))
    facts = describe(model, blueprint) | (kernels_of(blueprint) if kernels else {})
    lines = _kernels(facts) if kernels else plan_lines(facts["plan"]) if plan else _lines(facts)
    out(json.dumps(facts, ensure_ascii=False, indent=2) + "\n" if as_json else "".join(lines))


def describe(model: str, plan: Blueprint) -> dict[str, Any]:
    """Everything that is shown but the kernels, as plain data."""
    checkpoint, memory = plan.checkpoint, plan.memory
    spec = checkpoint.spec
    attention = spec.blocks[0].attention
    windows = [group.window for group in plan.program.kv.groups]
    kv = memory.token * 1000
    return {
        "model": model,
        "path": str(checkpoint.path),
        "kind": checkpoint.source.kind,
        "architecture": spec.family,
        "parameters": sum(math.prod(t.shape) for t in checkpoint.source.tensors.values()),
        "layers": len(spec.blocks),
        "width": spec.width,
        "heads": attention.heads,
        "kv_heads": attention.kv_heads,
        "head_dim": attention.dim,
        "windows": sorted({w for w in windows if w is not None}),
        "vocab": spec.vocab,
        "context": spec.context,
        "tensors": _tensors(checkpoint),
        "chat_template": checkpoint.tokenizer.chat_template,
        "special_tokens": _special_tokens(checkpoint),
        "suggested_sampling": asdict(checkpoint.generation),
        "memory": {
            "weights_stored": memory.stored,
            "weights_loaded": memory.weights,
            "step_buffers": memory.buffers,
            "kv_per_1000_tokens": kv,
            "kv_per_1000_tokens_past_windows": kv * windows.count(None) // len(windows),
            "pool": memory.pool.blocks * memory.pool.block_bytes,
            "pool_tokens": plan.limits.pool_tokens,
        },
        "plan": plan_facts(plan),
        "options": dict(_flat(plan.options)),
        "threads_because": plan.threads.reason,
    }


def kernels_of(plan: Blueprint) -> dict[str, Any]:
    """What --kernels adds."""
    return {"kernels": [asdict(member) for member in plan.members], "kernels_because": plan.backend.because}


def _tensors(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Per number format how many tensors, numbers and bytes; the largest first."""
    count, numbers, nbytes = Counter[str](), Counter[str](), Counter[str]()
    for t in checkpoint.source.tensors.values():
        count[t.format] += 1
        numbers[t.format] += math.prod(t.shape)
        nbytes[t.format] += t.nbytes
    return [{"format": f, "tensors": count[f], "numbers": numbers[f], "bytes": b} for f, b in nbytes.most_common()]


def _special_tokens(checkpoint: Checkpoint) -> dict[str, Any]:
    tokenizer = checkpoint.tokenizer

    def token(i: int | None) -> dict[str, Any] | None:
        known = i is not None and i < tokenizer.vocab_size
        return {"id": i, "text": tokenizer.piece(i).decode(errors="replace")} if known and i is not None else None

    return {
        "bos": token(tokenizer.bos),
        "add_bos": tokenizer.add_bos,
        "end": [token(i) for i in sorted(checkpoint.eos)],
        "pad": token(tokenizer.pad),
    }


def _flat(options: Any) -> Iterator[tuple[str, Any]]:
    """The fields of nested dataclasses by their own names, as the command line has them."""
    for field in fields(options):
        value = getattr(options, field.name)
        if isinstance(value, str | int | None):
            yield field.name, value
        else:
            yield from _flat(value)


def _lines(facts: Mapping[str, Any]) -> Iterator[str]:
    memory, tokens = facts["memory"], facts["special_tokens"]
    yield _line("model", facts["model"])
    yield _line("path", facts["path"])
    yield _line("architecture", f"{facts['architecture']}, {facts['parameters'] / 1e6:,.1f} million parameters")
    windows = "".join(f", window {w:,}" for w in facts["windows"])
    heads = f"{facts['heads']} heads of {facts['head_dim']}, {facts['kv_heads']} for keys and values{windows}"
    yield _line("layers", f"{facts['layers']} of width {facts['width']:,}; {heads}")
    yield _line("vocabulary", f"{facts['vocab']:,}")
    yield _line("context", f"trained for {facts['context']:,} tokens, configured {facts['options']['context']:,}")
    for row in facts["tensors"]:
        yield _line("tensors", f"{row['format']:<6} {row['tensors']:>5}  {size(row['bytes']):>9}")
    stored, loaded = size(memory["weights_stored"]), size(memory["weights_loaded"])
    yield _line("weights", f"{stored} stored, {loaded} in memory ({facts['options']['backend']})")
    yield _line("buffers", f"{size(memory['step_buffers'])} for one step")
    past = f", past the window {size(memory['kv_per_1000_tokens_past_windows'])}" if facts["windows"] else ""
    yield _line("KV cache", f"{size(memory['kv_per_1000_tokens'])} per 1,000 tokens{past}")
    yield _line("KV pool", f"{size(memory['pool'])}, {memory['pool_tokens']:,} tokens of one request")
    yield _line("tokens", f"begin {_token(tokens['bos'])}{'' if tokens['add_bos'] else ' (not added)'}")
    yield _line("", f"end {', '.join(_token(t) for t in tokens['end'] if t) or 'none'}")
    yield _line("sampling", _sampling(facts["suggested_sampling"]))
    yield _line("", "max tokens: up to the context; 16 in completions over HTTP")
    yield _line("options", ", ".join(f"{k} {v}" for k, v in facts["options"].items() if v is not None))
    yield _line("", f"threads: {facts['threads_because']}")
    yield from _template(facts["chat_template"])


def _kernels(facts: Mapping[str, Any]) -> Iterator[str]:
    yield _line("model", facts["model"])
    yield _line("why", facts["kernels_because"])
    yield _line("threads", f"{facts['options']['threads']}: {facts['threads_because']}")
    for k in facts["kernels"]:
        yield f"{k['operation']:<14}{k['format']:<8}{k['count']:>4} × {k['served_by']:<16}{k['how']}\n"


def _line(name: str, text: str) -> str:
    return f"{name:<14}{text}\n"


def _token(token: Mapping[str, Any] | None) -> str:
    return f"{token['text']!r} ({token['id']})" if token else "none"


def _sampling(suggested: Mapping[str, Any]) -> str:
    told = [f"{name} {value:g}" for name, value in suggested.items() if value is not None]
    if suggested["temperature"] is None:
        told.insert(0, f"temperature {TEMPERATURE:g} in run, 1 in the API")
    return ", ".join(told)


def _template(template: str | None) -> Iterator[str]:
    if template is None:
        yield _line("chat template", "none: the model completes text")
        return
    lines = template.splitlines()
    yield _line("chat template", f"{len(template):,} characters")
    for line in lines[:HEAD]:
        yield f"  | {line[:110]}{'…' if len(line) > 110 else ''}\n"
    if len(lines) > HEAD:
        yield f"  | … {len(lines) - HEAD} more (--json has all)\n"
