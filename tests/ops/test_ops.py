"""Every implementation of every operation, on all its cases, against its exact meaning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.ops.op import Case, Implementation, Op
from headrace.ops.registry import OPS
from tests.ops.calling import call
from tests.ops.definitions import DEFINITIONS

IMPLEMENTATIONS = [
    pytest.param(op, implementation, id=f"{op.signature.kind}-{name}")
    for op in OPS.values()
    for name, implementation in {"reference": op.reference, **op.implementations}.items()
]


def cases(op: Op) -> list[Case]:
    return list(op.cases(np.random.default_rng(11)))


def agrees(op: Op, got: np.ndarray, exact: np.ndarray) -> bool:
    if not op.signature.output:
        return got.dtype == exact.dtype and got.tobytes() == exact.tobytes()
    assert got.dtype == np.float32
    assert got.shape == exact.shape
    largest = np.abs(exact).max(initial=0.0)
    return bool((np.abs(got - exact) <= op.tolerance * largest).all())


@pytest.mark.parametrize(("op", "implementation"), IMPLEMENTATIONS)
def test_an_implementation_is_exact_within_its_tolerance(op: Op, implementation: Implementation) -> None:
    for case in cases(op):
        kind = op.signature.kind
        got, exact = call(op, implementation, case), DEFINITIONS[kind](case)
        assert agrees(op, got, exact), (
            f"{kind}, {case.name}: {np.abs(got - exact).max() if op.signature.output else ''}"
        )


def _attrs(**changes: Any) -> Callable[[Case], Case]:
    return lambda case: replace(case, attrs={**case.attrs, **changes})


def _window(by: int) -> Callable[[Case], Case]:
    def mutate(case: Case) -> Case:
        assert case.kv is not None
        window = case.kv.window
        return replace(case, kv=replace(case.kv, window=None if window is None else max(1, window + by)))

    return mutate


def _wrong_place(case: Case) -> Case:
    assert case.kv is not None
    return replace(case, kv=replace(case.kv, positions=case.kv.positions ^ 1))


def _inputs(change: Callable[[tuple[np.ndarray, ...]], tuple[np.ndarray, ...]]) -> Callable[[Case], Case]:
    return lambda case: replace(case, inputs=change(case.inputs))


MUTATIONS: dict[str, list[Callable[[Case], Case]]] = {
    "embed": [_attrs(scale=1.0), _inputs(lambda i: ((i[0] + 1) % 11,))],
    "select": [_inputs(lambda i: (i[0], i[1][::-1].copy()))],
    "linear": [lambda case: replace(case, weights=case.weights[:1])],
    "rms_norm": [_attrs(eps=0.0), _attrs(offset=0.0), lambda c: replace(c, weights=(c.weights[0][::-1].copy(),))],
    "angles": [_attrs(factor=1.0), _inputs(lambda i: (i[0] + 1,))],
    "rotate": [_inputs(lambda i: (i[0], np.roll(i[1], 1, 1))), _inputs(lambda i: (i[0], -i[1]))],
    "store": [_inputs(lambda i: i[::-1]), _wrong_place],
    "attend": [_attrs(scale=0.31), _attrs(softcap=None), _attrs(softcap=50.0), _window(1), _window(-1)],
    "gated": [_attrs(activation="silu"), _attrs(activation="gelu_tanh"), _inputs(lambda i: i[::-1])],
    "add": [_inputs(lambda i: (i[0], -i[1]))],
    "softcap": [_attrs(cap=31.0)],
}
"""Changes to a call that must show in the result of some case."""


MUTANTS = [
    pytest.param(OPS[kind], change, id=f"{kind}-{number}")
    for kind, changes in MUTATIONS.items()
    for number, change in enumerate(changes)
]


@pytest.mark.parametrize(("op", "change"), MUTANTS)
def test_a_mutation_is_seen(op: Op, change: Callable[[Case], Case]) -> None:
    exact = DEFINITIONS[op.signature.kind]
    assert any(not agrees(op, call(op, op.reference, change(case)), exact(case)) for case in cases(op))


def test_every_operation_has_definition_and_mutations() -> None:
    assert set(DEFINITIONS) == set(OPS) == set(MUTATIONS)
    assert len(OPS) < 25


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_cases_cover_what_is_optional(op: Op) -> None:
    if op.signature.optional:
        assert {len(case.weights) for case in cases(op)} == set(
            range(len(op.signature.weights) - op.signature.optional, len(op.signature.weights) + 1)
        )
    for case in cases(op):
        assert set(case.attrs) == set(op.signature.attrs)
        assert len(case.inputs) == len(op.signature.inputs)
