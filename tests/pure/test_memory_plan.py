"""The memory plan over made-up models and machines: what fits, what is refused, and that a refusal's figures hold."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace import hardware
from headrace.cache.plan import FEWEST_ROWS, MOST_ROWS, Demand, MemoryPlan, Needs, plan_memory, propose
from headrace.config import Options
from headrace.errors import OptionError
from tests.pure.test_hardware import tree, v2

MB = 10**6
SMALL = Needs(
    process=100 * MB, weights=100 * MB, buffers=50 * MB, block=MB, windows=(None,), context=4096, trained=8192
)
"""A whole context takes 128 blocks, 128 MB; beside it 250 MB."""


def planned(needs: Needs = SMALL, **given: Any) -> MemoryPlan:
    silent = {"granted": 0, "bound": None, "pool_bytes": None, "rows": None, "default_rows": 64}
    return plan_memory(needs, **silent | given)


def refused(needs: Needs = SMALL, **given: Any) -> OptionError:
    with pytest.raises(OptionError) as error:
        planned(needs, **given)
    return error.value


def test_a_bound_is_used_up_by_the_pool() -> None:
    plan = planned(granted=10_000 * MB, bound=1000 * MB)
    assert (plan.blocks, plan.chosen, plan.rows) == (750, "memory", 64)
    assert (plan.pool, plan.total, plan.remains, plan.limit) == (750 * MB, 1000 * MB, 0, 1000 * MB)
    assert plan.at_once(4096) == 5
    assert plan.at_once(8192) == 2
    assert plan.at_once(32) == 750
    assert plan.pool_tokens == 750 * 32


def test_no_larger_pool_than_all_rows_can_fill() -> None:
    assert planned(granted=10_000 * MB, bound=5000 * MB, rows=2).blocks == 2 * 128
    assert planned(granted=10_000 * MB, rows=2).blocks == 2 * 128
    assert planned(granted=10_000 * MB, rows=2).remains == (10_000 - 250 - 256) * MB


def test_without_a_word_half_of_what_is_left_is_taken_and_a_reserve_kept() -> None:
    plan = planned(granted=1600 * MB)
    assert (plan.blocks, plan.chosen) == ((1600 - 100 - 250) // 2, "default")
    assert planned(granted=510 * MB).blocks == 128, "one whole context comes before the half"


def test_what_is_advised_fits_where_the_process_grew_a_little() -> None:
    def advised(needs: Needs, bound: int) -> tuple[int, int]:
        told = str(refused(needs, bound=bound, granted=10_000 * MB))
        return int(told.split("context ")[2].split()[0]), int(told.split("at least ")[1].split("MB")[0])

    firm, wavering = SMALL, replace(SMALL, slack=4 * MB)
    (longest, least), (shorter, more) = advised(firm, 300 * MB), advised(wavering, 300 * MB)
    assert (shorter, more) == (longest - 4 * 32, least + 4)
    grown = replace(SMALL, process=SMALL.process + 4 * MB)
    planned(replace(grown, context=shorter), bound=300 * MB, granted=10_000 * MB)
    planned(grown, bound=more * MB, granted=10_000 * MB)


def test_a_system_that_says_nothing_bounds_nothing() -> None:
    plan = planned(rows=3)
    assert (plan.blocks, plan.limit, plan.remains) == (3 * 128, 0, 0)
    assert planned(pool_bytes=10**15).blocks == 10**9


def test_a_bound_above_what_is_granted() -> None:
    error = refused(granted=999 * MB, bound=1000 * MB)
    assert error.option == "memory"
    assert "1000MB" in str(error)
    assert "999MB" in str(error)


@pytest.mark.parametrize("bound", [None, 300 * MB])
def test_too_little_for_the_context_names_what_would_fit(bound: int | None) -> None:
    granted = 10_000 * MB if bound else 320 * MB
    error = refused(granted=granted, bound=bound)
    assert error.option == ("memory" if bound else "context")
    context, shorter, count = map(int, re.findall(r"context (\d+) for one .*?, (\d+) for (\d+) at once", str(error))[0])
    for fits, more in ((replace(SMALL, context=context), 0), (replace(SMALL, context=context + 1), 1)):
        if more:
            assert refused(fits, granted=granted, bound=bound).option
        else:
            assert planned(fits, granted=granted, bound=bound).at_once(shorter) == count
    [enough] = re.findall(r"least (\d+)MB", str(error))
    given = {"granted": 10_000 * MB, "bound": int(enough) * MB} if bound else {"granted": int(enough) * MB}
    assert planned(**given).at_once(4096) == 1
    given = {name: value - MB for name, value in given.items()}
    assert refused(**given)


@pytest.mark.parametrize("bound", [None, 240 * MB])
def test_too_little_for_anything(bound: int | None) -> None:
    granted = 10_000 * MB if bound else 240 * MB
    error = refused(granted=granted, bound=bound)
    assert error.option == "memory"
    for part in ("100MB of process", "100MB of weights", "50MB of buffers", "budget", "rows", "context 4096"):
        assert part in str(error)
    least, whole = map(int, re.search(r"least (\d+)MB for 32 tokens, (\d+)MB", str(error)).groups())  # type: ignore[union-attr]
    for megabytes, context in ((least, 32), (whole, 4096)):
        needs = replace(SMALL, context=context)
        given = {"granted": 10_000 * MB, "bound": megabytes * MB} if bound else {"granted": megabytes * MB}
        assert planned(needs, **given).at_once(context) >= 1


def test_an_explicit_pool_wins_and_may_not_contradict() -> None:
    assert planned(granted=1000 * MB, pool_bytes=4 * MB + 5).blocks == 4
    assert planned(granted=1000 * MB, pool_bytes=4 * MB).chosen == "pool_bytes"
    assert planned(granted=9000 * MB, bound=1000 * MB, pool_bytes=750 * MB).remains == 0
    error = refused(granted=9000 * MB, bound=1000 * MB, pool_bytes=751 * MB)
    assert error.option == "pool_bytes"
    assert f"at most {750 * MB}, or memory at least 1001MB" in str(error)
    assert "1000MB are free" in str(refused(granted=1000 * MB, pool_bytes=751 * MB))
    assert "at most 0" in str(refused(granted=200 * MB, pool_bytes=2 * MB))
    assert "at least 2000000" in str(refused(replace(SMALL, windows=(None, 64)), pool_bytes=MB))


def test_a_proposal_has_room_for_nearly_all_that_came_and_a_quarter_more() -> None:
    proposal = propose(SMALL, Demand(length=640, at_once=40))
    assert (proposal.blocks, proposal.rows) == (50 * 20, 50)
    assert propose(SMALL, Demand(length=64, at_once=1)).blocks == 128, "one whole context is always allowed"
    assert propose(SMALL, Demand(length=64, at_once=1)).rows == FEWEST_ROWS
    assert propose(SMALL, Demand(length=64, at_once=10**6)).rows == MOST_ROWS
    assert propose(SMALL, Demand(length=10**6, at_once=4)) == propose(SMALL, Demand(length=4096, at_once=4))


def test_a_proposal_is_used_only_when_asked() -> None:
    demand = Demand(length=640, at_once=10)
    shown = planned(granted=10_000 * MB, demand=demand)
    assert (shown.chosen, shown.rows, shown.proposal) == ("default", 64, propose(SMALL, demand))
    used = planned(granted=10_000 * MB, demand=demand, automatic=True)
    assert (used.chosen, used.rows, used.blocks) == ("past load", 13, 13 * 20)
    assert planned(granted=10_000 * MB, demand=demand, automatic=True, rows=5).rows == 5
    assert planned(granted=10_000 * MB, demand=demand, automatic=True, pool_bytes=9 * MB).blocks == 9
    assert planned(granted=10_000 * MB, automatic=True).chosen == "default"
    tight = planned(granted=480 * MB, demand=demand, automatic=True)
    assert tight.blocks == 480 - 30 - 250


def made_up(choose: random.Random) -> Needs:
    windows = tuple(choose.choice([None, 40, 512]) for _ in range(choose.randint(1, 6)))
    trained = choose.choice([512, 8192, 131072])
    return Needs(
        process=choose.randrange(50 * MB, 300 * MB),
        weights=choose.randrange(10**5, 10**10),
        buffers=choose.randrange(10**5, 10**8),
        block=choose.randrange(1024, 8 * MB),
        windows=windows,
        context=choose.randrange(1, trained + 1),
        trained=trained,
    )


def test_no_plan_exceeds_what_there_is_and_more_memory_is_never_worse() -> None:
    choose = random.Random(5)
    fitted = 0
    for _ in range(1500):
        needs, given = made_up(choose), dict[str, Any]()
        limit = choose.randrange(10**8, 4 * 10**10)
        given = {"granted": limit} if choose.random() < 0.5 else {"granted": limit * 2, "bound": limit}
        if choose.random() < 0.3:
            given["demand"] = Demand(choose.randrange(1, 200_000), choose.randrange(1, 400))
            given["automatic"] = choose.random() < 0.7
        if choose.random() < 0.2:
            given["pool_bytes"] = choose.randrange(1, 10**10)
        more = {name: 2 * value if name in ("granted", "bound") else value for name, value in given.items()}
        try:
            plan = planned(needs, **given)
        except OptionError:
            continue
        fitted += 1
        assert plan.total + plan.remains == plan.limit == limit
        assert plan.total <= limit
        assert plan.blocks >= len(needs.windows)
        assert "pool_bytes" in given or plan.at_once(needs.context) >= 1
        assert (
            needs.blocks(plan.pool_tokens) <= plan.blocks < needs.blocks(plan.pool_tokens + 1)
            or None not in needs.windows
        )
        larger = planned(needs, **more)
        assert larger.blocks >= plan.blocks
        assert larger.at_once(needs.context) >= plan.at_once(needs.context)
    assert fitted > 300


def test_whatever_a_refusal_names_fits() -> None:
    choose = random.Random(6)
    named = 0
    for _ in range(1500):
        needs, limit = made_up(choose), choose.randrange(10**8, 2 * 10**10)
        given = {"granted": limit} if choose.random() < 0.5 else {"granted": limit * 2, "bound": limit}
        try:
            planned(needs, **given)
            continue
        except OptionError as error:
            found = re.search(r"context (\d+) for one", str(error))
        if found:
            named += 1
            assert planned(replace(needs, context=int(found[1])), **given).at_once(int(found[1])) >= 1
    assert named > 100


def test_a_control_group_bounds_the_plan(tmp_path: Path) -> None:
    """What a container grants, less what others in it hold; clean cache is no loss."""
    files = {
        "a/memory.max": str(1000 * MB),
        "a/memory.current": str(900 * MB),
        "a/memory.stat": f"anon {100 * MB}\ninactive_file {300 * MB}\nactive_file {500 * MB}",
    }
    root = v2(tree(tmp_path, {"proc/meminfo": "MemAvailable: 8000000 kB"}), "/a", files)
    granted = hardware.granted_memory(root)
    assert granted == 900 * MB
    assert planned(granted=granted).blocks == (900 * MB - 900 * MB // 16 - 250 * MB) // 2 // MB
    assert refused(granted=hardware.granted_memory(root) // 3).option == "context"


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("6GiB", 6 << 30), ("6gib", 6 << 30), (" 1.5 GB ", 1_500_000_000), ("6000MB", 6_000_000_000), ("7", 7),
        ("512kB", 512_000), ("1KiB", 1024), ("2TiB", 2 << 40), ("10B", 10), (6_000_000_000, 6_000_000_000),
        ("auto", None), (None, None),
    ],
)  # fmt: skip
def test_sizes(text: Any, nbytes: int | None) -> None:
    assert Options.of(memory=text).memory_bytes == nbytes
    assert Options.of(memory=text).automatic == (text == "auto")


@pytest.mark.parametrize(
    "text", ["6G", "6 gigabytes", "-1GB", "0", "0.1B", "", "GiB", "1e9", "1,5GB", True, "9" * 5000, "٦GB"]
)
def test_what_is_no_size_is_refused_with_what_would_be(text: Any) -> None:
    with pytest.raises(OptionError, match="memory must be a size like 6GiB, 6000MB or 6000000000") as error:
        Options.of(memory=text)
    assert error.value.option == "memory"
