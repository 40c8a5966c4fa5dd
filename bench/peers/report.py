"""One run's figures as data and as Markdown. Knows no engine."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.peers.lines import Line
from bench.peers.machine import Machine
from bench.peers.roofline import Work


@dataclass(slots=True)
class Cell:
    """One engine on one line of one model."""

    runs: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def median(self) -> float | None:
        return statistics.median(self.runs) if self.runs else None

    def text(self) -> str:
        if not self.runs:
            return "fails" if self.error else ""
        return f"{_short(statistics.median(self.runs))} ({_short(min(self.runs))}–{_short(max(self.runs))})"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of one model: each engine's cell, Headrace's first."""

    model: str
    line: Line
    cells: Mapping[str, Cell]
    work: Work | None

    def ratio(self) -> float | None:
        """Headrace to the best of the others; above 1 is Headrace ahead, whatever the unit."""
        own, *others = (cell.median for cell in self.cells.values())
        known = [value for value in others if value is not None]
        if own is None or not known:
            return None
        return own / max(known) if self.line.most_is_best else min(known) / own

    def ceiling(self, machine: Machine) -> float | None:
        return self.work.tokens / self.work.seconds(machine) if self.work else None


def data(rows: Sequence[Row], machine: Machine) -> list[dict[str, Any]]:
    """For the JSON file."""
    return [
        {
            "model": row.model,
            "line": row.line.name,
            "unit": row.line.unit,
            "ratio_to_best_peer": row.ratio(),
            "ceiling": row.ceiling(machine),
            "work_of_a_step": asdict(row.work) if row.work else None,
            "engines": {name: _cell(row, cell, machine) for name, cell in row.cells.items()},
        }
        for row in rows
    ]


def markdown(rows: Sequence[Row], machine: Machine) -> str:
    """The table: medians, in brackets the least and the most."""
    names = list(rows[0].cells)
    head = ["model", "", *names, "ratio to the best peer", "ceiling", f"{names[0]}'s share of it"]
    table = [_line(head), _line(["---", "---", *["--:"] * (len(head) - 2)])]
    for row in rows:
        ratio, ceiling, own = row.ratio(), row.ceiling(machine), row.cells[names[0]].median
        share = f"{own / ceiling:.0%}" if own and ceiling else ""
        cells = [cell.text() for cell in row.cells.values()]
        ends = ["" if ratio is None else f"{ratio:.2f}", "" if ceiling is None else _short(ceiling), share]
        table.append(_line([row.model, f"{row.line.what}, {row.line.unit}", *cells, *ends]))
    return "\n".join(table)


def machine_markdown(machine: Machine, name: str, threads: int) -> str:
    """The ceilings in words."""
    return (
        f"Machine: {name}, {threads} threads. It reads {machine.read_1gb / 1e9:.1f} GB/s (90 MB: "
        f"{machine.read_90mb / 1e9:.1f}) and multiplies {machine.int8 / 1e12:.2f} T int8 ({machine.int8_loop}) or "
        f"{machine.float32 / 1e12:.2f} T float32 per second. The ceiling is the longer of reading the step's bytes and "
        "of its products, in int8 or, for a folder of safetensors, in float32."
    )


def _cell(row: Row, cell: Cell, machine: Machine) -> dict[str, Any]:
    said: dict[str, Any] = {"median": cell.median, "runs": cell.runs, "error": cell.error}
    if cell.runs:
        said |= {"min": min(cell.runs), "max": max(cell.runs)}
    if cell.median and row.work:
        step = row.work.tokens / cell.median
        said["share_of_read"] = (row.work.weights + row.work.kv) / step / machine.read(row.work.weights)
        said["share_of_products"] = row.work.products / step / row.work.multiplied(machine)
    return said


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
