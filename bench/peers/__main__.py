"""Headrace and its peers on the same files, threads and machine; Markdown on standard output.

    python -m bench.peers MODEL ... [--threads 2] [--repeat 5] [--lines decode,prefill] [--json out.json]

Run it in the repository, on a machine with nothing else to do. Each repetition runs every engine once, in turn, each in
a process of its own, in the other order the next time. README.md says how each engine is installed and set.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.peers.headrace import Headrace
from bench.peers.lines import LINES, Line
from bench.peers.llama_cpp import LlamaCpp
from bench.peers.machine import Ceilings, processor
from bench.peers.openvino import OpenVINO
from bench.peers.peer import Peer, PeerError, Setting
from bench.peers.report import Cell, Row, data, machine_markdown, markdown
from bench.peers.roofline import sizes, work
from bench.peers.vllm_cpu import VllmCpu
from headrace.hardware import granted_cores

Cells = dict[tuple[str, str], Cell]
"""By engine and line, of one model."""


def installed(peers: Sequence[Peer]) -> dict[str, str]:
    """Name and version of those that are there; says which are not."""
    versions = {}
    for peer in peers:
        try:
            versions[peer.name] = peer.version()
        except PeerError as missing:
            note(f"{peer.name} is left out: {missing}")
    return versions


def compare(
    model: Path, peers: Sequence[Peer], lines: Sequence[Line], repeat: int, ceilings: Ceilings
) -> tuple[Cells, dict[str, str]]:
    """All runs on one model, and what each engine chose for it. One that fails is left out of the rest of them."""
    cells = {(peer.name, line.name): Cell() for peer in peers for line in lines}
    chosen: dict[str, str] = {}
    running = list(peers)

    def fail(peer: Peer, error: PeerError) -> None:
        note(f"{peer.name} fails: {error}")
        running.remove(peer)
        for line in lines:
            cells[peer.name, line.name].error = str(error)

    for peer in peers:
        note(f"{title(model)}: {peer.name} prepares")
        try:
            chosen[peer.name] = peer.prepare(model, lines)
        except PeerError as error:
            fail(peer, error)
    for repetition in range(repeat):
        ceilings.measure()
        for peer in list(running)[:: -1 if repetition % 2 else 1]:
            note(f"{title(model)}: {peer.name}, {repetition + 1} of {repeat}")
            try:
                figures = peer.measure(model, lines)
            except PeerError as error:
                fail(peer, error)
                continue
            for name, value in figures.items():
                cells[peer.name, name].runs.append(value)
    return cells, chosen


def title(model: Path) -> str:
    return model.name if model.is_dir() else model.stem


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("models", nargs="+", type=Path)
    ask.add_argument("--threads", type=int, default=granted_cores().count)
    ask.add_argument("--repeat", type=int, default=5)
    ask.add_argument("--lines", default=",".join(LINES), help="default: %(default)s")
    ask.add_argument("--isa", choices=("avx2",), help="no newer instructions, in all engines that can do without")
    ask.add_argument("--vllm-python", help="the interpreter of an environment with vllm-cpu")
    ask.add_argument("--openvino-python", help="the interpreter of an environment with openvino-genai")
    ask.add_argument("--without", default="", help="engines to leave out, by their names in the table")
    ask.add_argument("--json", type=Path, help="every run, every share")
    args = ask.parse_args()
    setting = Setting(args.threads, args.isa)
    lines = [LINES[name] for name in args.lines.split(",")]
    peers: list[Peer] = [Headrace(setting), LlamaCpp(setting)]
    peers += [VllmCpu(setting, args.vllm_python)] if args.vllm_python else []
    peers += [OpenVINO(setting, args.openvino_python)] if args.openvino_python else []
    versions = installed([peer for peer in peers if peer.name not in args.without.split(",")])
    peers = [peer for peer in peers if peer.name in versions]
    ceilings = Ceilings(setting)
    measured = [(model, *compare(model, peers, lines, args.repeat, ceilings)) for model in args.models]
    machine = ceilings.machine()
    rows = []
    for model, cells, _ in measured:
        size = sizes(model)
        for line in lines:
            of_line = {peer.name: cells[peer.name, line.name] for peer in peers}
            rows.append(Row(title(model), line, of_line, work(line, size)))
    print(markdown(rows, machine), machine_markdown(machine, processor(), args.threads), sep="\n\n")
    if args.json:
        said = {
            "machine": {"processor": processor(), "threads": args.threads, "isa": args.isa, "runs": ceilings.runs},
            "versions": versions,
            "options": {title(model): chosen for model, _, chosen in measured},
            "rows": data(rows, machine),
        }
        args.json.write_text(json.dumps(said, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
