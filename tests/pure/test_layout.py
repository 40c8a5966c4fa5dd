"""The house keeps its shape: which part may know which, what files there are, which words are used."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "headrace"

LINES = """
__main__ cli serve measure
engine
scheduler speculate constrain cache.radix cache.tiers cache.plan cache.blocks
execute
loading quantize
program cache.pool
native
models ops
formats tokenize
hardware config params paths errors
"""
ORDER = tuple(part for line in LINES.strip().splitlines() for part in line.split())
"""From top to bottom; within a line from left to right. Each may import what comes later in this list, and itself."""

INDEPENDENT = [("models", "ops"), ("formats", "tokenize"), ("serve", "measure")]
"""Neighbours in one line that must not know each other at all."""

WORDS = {
    "page": "block",
    "pages": "blocks",
    "job": "request",
    "iteration": "step",
    "util": "a name that says what it does",
    "utils": "a name that says what it does",
    "helper": "a name that says what it does",
    "helpers": "a name that says what it does",
    "misc": "a name that says what it does",
    "mixin": "a member of a seam",
    "seqlen": "a length named for what it counts",
    "decoding_phase": "row",
    "prefill_phase": "row",
}
"""Words that have a better one here: see CONTRIBUTING.md."""

MODULES = sorted(SRC.rglob("*.py"))


def part(module: str) -> str:
    """The part of the house a dotted module name (below `headrace`) belongs to."""
    names = module.split(".")
    return ".".join(names[:2]) if names[0] == "cache" else names[0]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path: Path) -> Iterator[str]:
    """Every headrace module a file imports, those inside functions and for type checkers too, without `headrace.`."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (a.name.removeprefix("headrace.") for a in node.names if a.name.startswith("headrace."))
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("headrace"):
            inside = node.module.removeprefix("headrace").lstrip(".")
            for a in node.names:
                is_module = (SRC / inside.replace(".", "/") / f"{a.name}.py").exists()
                if is_module or inside:  # what is left are the public names, which the package finds where they live
                    yield f"{inside}.{a.name}".lstrip(".") if is_module else inside


def identifiers(path: Path) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_only_go_down(path: Path) -> None:
    name = ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
    if name == "__init__":
        return
    own = part(name)
    assert own in ORDER, f"{own} has no place in the order of parts"
    for module in imports(path):
        other = part(module)
        assert other in ORDER, f"{name} imports {module}, which has no place in the order of parts"
        assert ORDER.index(other) >= ORDER.index(own), f"{name} imports {module}, which stands above it"
        assert (own, other) not in INDEPENDENT, f"{name} imports {module}: these two must not know each other"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SRC)))
def test_every_module_says_what_it_owns(path: Path) -> None:
    if path.read_text(encoding="utf-8").strip():
        assert ast.get_docstring(tree(path)), f"{path} has no docstring"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SRC)))
def test_words(path: Path) -> None:
    assert not set(path.stem.lower().split("_")) & set(WORDS), f"{path.name} is no name for a module"
    for name in identifiers(path):
        for word in re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_"):
            assert word not in WORDS, f"{path.relative_to(SRC)}: {name}: say {WORDS[word]} instead of {word}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SRC)))
def test_functions_fit_on_a_screen(path: Path) -> None:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.body[0].lineno + 1
            assert lines <= 60, f"{path.relative_to(SRC)}: {node.name} has {lines} lines"


def test_a_violation_is_seen(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("from headrace.engine import outputs\nfrom headrace.scheduler.scheduler import Scheduler\n")
    assert sorted(imports(bad)) == ["engine.outputs", "scheduler.scheduler"]
    worse = tmp_path / "worse.py"
    worse.write_text("def f(page_count: int) -> None:\n    self.job = 1\n")
    assert {"page_count", "job"} <= set(identifiers(worse))


def test_no_behaviour_by_accident() -> None:
    """No monkey business: no getattr/hasattr probing of our own types, no bare except, no print outside the CLI."""
    for path in MODULES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "hasattr", f"{path.relative_to(SRC)}:{node.lineno}: hasattr"
                if "cli" not in path.parts and "serve" not in path.parts:
                    assert node.func.id != "print", f"{path.relative_to(SRC)}:{node.lineno}: print"
            assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f"{path}:{node.lineno}: bare except"
