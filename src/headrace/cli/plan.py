"""The memory plan as `headrace show --plan` and the server's start print it, and as JSON has it. Only words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from headrace.cli.console import size

if TYPE_CHECKING:
    from headrace.engine.build import Blueprint

_CHOSEN = {
    "pool_bytes": "as pool_bytes says",
    "memory": "what memory leaves, at most `rows` whole contexts",
    "past load": "as past load needed",
    "default": "half of what is left, at most `rows` whole contexts; memory sets a bound",
}


def plan_facts(blueprint: Blueprint) -> dict[str, Any]:
    """Everything that is shown, as plain data; bytes, where nothing else is said."""
    plan, seen, cache = blueprint.memory.plan, blueprint.seen, blueprint.options.cache
    needs, proposal = plan.needs, plan.proposal
    return {
        "process": needs.process,
        "weights": needs.weights,
        "buffers": needs.buffers,
        "pool": plan.pool,
        "pool_blocks": plan.blocks,
        "pool_tokens": plan.pool_tokens,
        "pool_chosen_by": plan.chosen,
        "disk_tier": None if cache.cache_dir is None else {"folder": cache.cache_dir, "bytes": cache.cache_dir_bytes},
        "total": plan.total,
        "first_start": plan.first_start,
        "granted": plan.granted,
        "memory": plan.bound,
        "automatic": blueprint.options.automatic,
        "remains": plan.remains,
        "rows": plan.rows,
        "context": needs.context,
        "trained": needs.trained,
        "at_once": plan.at_once(needs.context),
        "at_once_trained": plan.at_once(needs.trained),
        "past_load": seen and seen.described(),
        "proposal": proposal and {"pool": proposal.blocks * needs.block, "rows": proposal.rows},
    }


def plan_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """`plan_facts` for people."""
    limit = facts["granted"] if facts["memory"] is None else facts["memory"]
    if facts["memory"] is not None:
        bound = f"{size(limit)} by the option; {_granted(facts['granted'])}"
    else:
        bound = _granted(facts["granted"])
    yield _line("memory", bound)
    yield _line("process", f"{size(facts['process']):>9}  the interpreter, the tokenizer, what requests bring")
    yield _line("weights", f"{size(facts['weights']):>9}")
    yield _line("buffers", f"{size(facts['buffers']):>9}  of one step")
    yield _line("KV pool", f"{size(facts['pool']):>9}  {_CHOSEN[facts['pool_chosen_by']]}")
    remains = f", {size(facts['remains'])} remain" if limit else ""
    yield _line("together", f"{size(facts['total']):>9}{remains}")
    if facts["first_start"] > facts["total"]:
        yield _line("first start", f"{size(facts['first_start']):>9}  while weights are packed; droppable file pages")
    counts = f"{facts['at_once']:,} of the context {facts['context']:,}"
    if facts["trained"] != facts["context"]:
        counts += f", {facts['at_once_trained']:,} of the model's own {facts['trained']:,}"
    if tier := facts["disk_tier"]:
        yield _line("disk tier", f"{size(tier['bytes']):>9}  at most, of blocks that left the pool: {tier['folder']}")
    yield _line("at once", f"{counts}; {facts['rows']:,} rows in a step")
    yield from _past(facts)


def _granted(granted: int) -> str:
    return f"{size(granted)} are granted to this process" if granted else "the system does not say what is granted"


def _past(facts: Mapping[str, Any]) -> Iterator[str]:
    """What was seen of this model's requests before, and what it proposes for those to come."""
    past, proposal = facts["past_load"], facts["proposal"]
    by_default = "; --memory auto is as the default" if facts["automatic"] else ""
    if past is None:
        yield _line("past load", f"none known{by_default}")
        return
    seen = f"{past['requests']:,} answers since {past['since']}"
    if proposal is None:
        yield _line("past load", f"{seen}: too few to propose anything{by_default}")
        return
    longest, beside = past["length"], past["at_once"]
    yield _line(
        "past load",
        f"{seen}: 99 of 100 had at most {longest['nearly_all']:,} tokens (prompt {past['prompt']['nearly_all']:,}, "
        f"answer {past['answer']['nearly_all']:,}), the longest {longest['most']:,};",
    )
    yield _line(
        "", f"99 of 100 came with at most {beside['nearly_all']:,} under way at once, the most {beside['most']:,}"
    )
    taken = "taken as far as it fits" if facts["automatic"] else "--memory auto takes them"
    yield _line(
        "proposal", f"for such a load a KV pool of {size(proposal['pool'])} and {proposal['rows']:,} rows; {taken}"
    )


def _line(name: str, text: str) -> str:
    return f"{name:<14}{text}\n"
