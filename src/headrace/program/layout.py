"""Where each layer's keys and values go: the grouping of layers that lets one free list of blocks serve them all."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.program.program import KVGroup, KVLayout

WASTE = 0.04
"""Largest share of a block's slots that may stand empty because the last group of a window is short."""


def kv_layout(windows: Sequence[int | None], kv_heads: int, dim: int, context: int) -> KVLayout:
    """Groups by window, layers in order, cut so that every group has (nearly) the same number of layers.

    A block has one slot per layer of a group. Fewer and longer groups mean fewer block tables; unequal windows mean
    that the last group of each may not fill its slots: the largest number of slots that wastes at most `WASTE`. A
    window that no context can leave is none.
    """
    by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        by_window.setdefault(window if window is not None and window < context else None, []).append(layer)

    def groups_with(slots: int) -> int:
        return sum(-(-len(layers) // slots) for layers in by_window.values())

    longest = max(len(layers) for layers in by_window.values())
    slots = next(s for s in range(longest, 0, -1) if 1 - len(windows) / (groups_with(s) * s) <= WASTE)
    groups = tuple(
        KVGroup(window, tuple(layers[i : i + slots]))
        for window, layers in by_window.items()
        for i in range(0, len(layers), slots)
    )
    return KVLayout(groups, slots, kv_heads, dim)
