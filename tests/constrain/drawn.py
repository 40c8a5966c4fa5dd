"""Answers drawn at random under a grammar, without a model, and the judgement of somebody else on them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator

from headrace.constrain.constraint import Constraint
from headrace.tokenize.tokenizer import Tokenizer

ENDS = '"}],:0 \\'
SPICE = '\\"u0123456789abdefx-+.eE{}[],:/ \n'


class Drawer:
    """Draws tokens from everywhere, among them often the signs that trip a grammar up."""

    def __init__(self, tokenizer: Tokenizer, width: int) -> None:
        self._tokenizer, self._words = tokenizer, -(-width // 32)
        self._ends, self._spice = (
            np.array([tokenizer.encode(c, parse_special=False, add_bos=False)[-1] for c in of]) for of in (ENDS, SPICE)
        )

    def answer(self, constraint: Constraint, seed: int, most: int = 300) -> tuple[str, bool]:
        """Its text, and whether it is whole."""
        rng, taken = random.Random(seed), []
        hurry = rng.randrange(4, 60)
        line = np.zeros(self._words, np.uint32)
        while len(taken) < most and not constraint.done:
            if constraint.accepting and rng.random() < 0.3:
                break
            constraint.fill(line)
            token = self._one(line, rng, ends=len(taken) > hurry)
            constraint.take(token)
            taken.append(token)
        return self._tokenizer.decode(taken), constraint.accepting

    def _one(self, line: np.ndarray[Any, Any], rng: random.Random, *, ends: bool) -> int:
        few = self._ends if ends else self._spice if rng.random() < 0.6 else self._ends[:0]
        few = few[(line[few // 32] >> (few % 32).astype(np.uint32)) & 1 == 1]
        if ends and len(few):
            return int(few[0]) if rng.random() < 0.8 else int(rng.choice(few))
        if len(few):
            return int(rng.choice(few))
        return int(rng.choice(np.flatnonzero(np.unpackbits(line.view(np.uint8), bitorder="little"))))


def faults(schema: Any, text: str) -> list[str]:
    """What `jsonschema` finds wrong with an answer: as it stands, and were the first of two equal names kept."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    validator = Draft202012Validator(_as_of_2020(exact), format_checker=Draft202012Validator.FORMAT_CHECKER)
    found = []
    for pairs in (dict, _first):
        value = json.loads(text, parse_float=Decimal, object_pairs_hook=pairs)
        found += [error.message[:200] for error in validator.iter_errors(value)]
    return found


def _first(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return dict(reversed(pairs))


def _as_of_2020(schema: Any) -> Any:
    """Lists of `items` under their new name: the validator knows no older draft's. Names of `$id` are left out."""
    if isinstance(schema, list):
        return [_as_of_2020(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    out = {key: _as_of_2020(said) for key, said in schema.items() if key != "$id"}
    if isinstance(out.get("items"), list):
        out["prefixItems"] = out.pop("items")
        if "additionalItems" in out:
            out["items"] = out.pop("additionalItems")
    if isinstance(ref := out.get("$ref"), str):
        out["$ref"] = ref.replace("#/items/", "#/prefixItems/").replace(" ", "%20")
    if isinstance(pattern := out.get("pattern"), str):
        out["pattern"] = pattern.replace("(?<year>", "(?P<year>")  # as Python writes it
    return out
