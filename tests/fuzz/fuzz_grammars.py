"""Mutated schemas, regular expressions and grammars, as a client may send them: each is refused, or compiles soon and
never holds a step up. `python tests/fuzz/fuzz_grammars.py MODEL.gguf --count 20000`; exits with 1 where one did not.

Each is compiled and driven for 50 random tokens in a process of its own kind, with bounded memory: the library may not
abort either. Times are the processor's, so that a busy machine says nothing wrong.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headrace.constrain.compiler import Compiler
from headrace.constrain.constraint import ConstraintError
from headrace.constrain.lark import admit
from headrace.errors import RequestError
from headrace.loading.checkpoint import open_checkpoint
from headrace.params import Grammar
from tests.constrain.schemas import ANSWERED, REFUSED

WIDTH = 49152
BATCH = 100
"""So many cases share one process."""
COMPILE_SECONDS, MASK_SECONDS, MEGABYTES = 2.0, 0.1, 600
TOKENS = 50

REGEXES = [
    "[a-z]+@[a-z]+\\.com",
    "(a|b)*abb",
    "\\d{3}-\\d{4}",
    "(foo|bar|baz){1,5}",
    '[^"]*',
    ".*x.{20}",
    "\\p{L}+\\s\\p{N}*",
    "(?i)yes|no",
    "((a|b){2,4}c?)+",
    "[\\x00-\\x7f]{1,9}",
    "(ab|a)(bc|c)*",
    "é+|日本",
    "a?b?c?d?e?",
    "(.{1,50},){3}",
    "\\w+(\\W\\w+)*",
    "^\\S+$",
    "[\\w.]+",
    "(x+x+)+y",
    "[a-zA-Z&&[^q]]",
    "(a*)*",
]
LARKS = [
    'start: word (" " word)*\nword: /[a-z]+/',
    'start: expr\nexpr: term (("+" | "-") term)*\nterm: NUM | "(" expr ")"\nNUM: /[0-9]+/',
    'start: "a"{1,5} B~2..4 c?\nB: "b" | "bb"\nc: "c" c | "d"',
    'start: item+\nitem: KEY ":" VALUE "\\n"\nKEY: /[a-z_]{1,20}/\nVALUE: /[^\\n]*/',
    '%ignore /[ \\t]{1,4}/\nstart: (A | B)* C\nA: "x"\nB: A A\nC: "end"i',
    'start: TEXT "<" tag ">"\ntag[lazy]: /.*x/\nTEXT: /[^<]*/ & ~/.*foo.*/',
    'start: a\na: a "x" | b\nb: "y" b | ',
    '%import common.INT\nstart: INT ("," INT)*',
]
GBNFS = [
    'root ::= "x" num\nnum ::= [0-9]+',
    'root ::= object\nobject ::= "{" pair ("," pair)* "}"\npair ::= str ":" val\n'
    'str ::= "\\"" [a-z]* "\\""\nval ::= str | object',
    'root ::= (item | "-"){2,5}\nitem ::= [^\\n]+ "\\n"',
    'root ::= ws "a"? ws\nws ::= [ \\t\\n]*',
]
BITS = [
    *(
        "{0,}",
        "{1000}",
        "{3,700}",
        "{99}",
        "*",
        "+",
        "?",
        "|",
        "(",
        ")",
        "[",
        "]",
        "^",
        "$",
        ".",
        "\\",
        "~",
        "&",
        "-",
        '"',
        "/",
    ),
    *(
        ".*",
        "[a-z]",
        "\\p{L}",
        "\\w",
        "\\s",
        "(a|b)",
        "x",
        "é",
        "😀",
        "(?i)",
        "\\b",
        "%json {}",
        "%lark",
        "%llguidance {}",
        "<[*]>",
    ),
    *(
        '%regex { "substring_words": "a b c d" }',
        "[temperature=1]",
        "[lazy]",
        "start",
        "~3..900",
        ": ",
        "\n",
        "// x",
        " ",
    ),
]
NUMBERS: list[float] = [
    *(0, 1, 2, 3, 7, 11, 64, 97, 255, 1000, 4095, 4096, 4097, 9999, 19997, 65535, 65536, 10**6, 2**31, 2**32),
    *(2**53, 2**63, 10**18, 10**30, -1, 0.1, 0.5, 0.001, 1e-6, 1e-7, 0.07, 12.34, 1e9, 1e300, -2.5),
]
BOUNDS = ("multipleOf", "minLength", "maxItems", "minimum", "maximum", "minProperties")
WORDS = ["a", "b", "id", "", "é", "x-1", '"', "\\", "\n", "k" * 300, "type", "$ref", "^a", "[ab]*", "\u2028"]


class Case(NamedTuple):
    kind: str
    source: str


def large(rng: random.Random) -> Case:
    """As large as the bounds allow, or a little larger."""
    few, some, many = rng.randrange(2, 20), rng.randrange(20, 400), rng.randrange(400, 2_500)
    regex = rng.choice(REGEXES)
    return rng.choice((_large_schema, _large_text))(rng, regex, few, some, many)


def _large_schema(rng: random.Random, regex: str, few: int, some: int, many: int) -> Case:
    text = {"type": "string", "pattern": f"({regex}){{{rng.randrange(1, some)}}}"}
    either = [{"type": "string", "pattern": f"{regex}{'.' * n}{n}"} for n in range(some)]
    parts = [
        {"type": "object", "properties": {f"{regex}{n}": {"const": k} for k in range(few)}, "required": [f"{regex}{n}"]}
        for n in range(few)
    ]
    names = {f"p{n * 7919 % 10007}": rng.choice(({"type": "null"}, {"type": "string"}, text)) for n in range(many)}
    schemas: list[Any] = [
        {"type": "object", "properties": names, "required": list(names)[: rng.choice((0, 5, many))]},
        {"type": "object", "properties": names, "additionalProperties": False, "minProperties": rng.choice((0, 1))},
        {"type": "object", "properties": names, "anyOf": [{"required": [name]} for name in list(names)[:few]]},
        {"anyOf": either},
        {"allOf": either[:few]},
        {"anyOf": [{"type": "array", "items": one} for one in either]},
        {"allOf": [{"anyOf": parts} for _ in range(rng.randrange(1, 5))]},
        {"oneOf": parts},
        {"allOf": [{"anyOf": [text, *either[:few]]} for _ in range(few)]},
        {"enum": [f"{regex}{n * 7919 % 100_003}" for n in range(2 * many)]},
        {"enum": [{"a": [n]} for n in range(many)]},
        {"type": "string", "pattern": regex, "minLength": many, "maxLength": 20 * many},
        {"const": regex * some},
        {"type": "array", "minItems": many, "maxItems": 2 * many, "items": rng.choice(parts)},
        {"type": "object", "minProperties": 1, "maxProperties": many, "additionalProperties": text},
        {"type": "object", "patternProperties": {f"^{n}{regex}": text for n in range(few)}},
        {
            "type": "array",
            "prefixItems": [{"type": "integer", "multipleOf": rng.randrange(1, 200)} for _ in range(few)],
        },
        {"anyOf": [{"type": "number", "multipleOf": rng.choice((0.01, 7, 0.5, 121, 10007))} for _ in range(few)]},
        {"type": "number", "multipleOf": rng.randrange(1, 20_000), "minimum": rng.random(), "maximum": 10.0**few},
    ]
    return Case("json", json.dumps(rng.choice(schemas)))


def _large_text(rng: random.Random, regex: str, few: int, some: int, many: int) -> Case:
    rules = "\n".join(f'r{n}: "{n % 7}" r{n * 7 % some} | /{n}[a-z]{{{few}}}/' for n in range(some))
    optional = " ".join(f"a{n}?" for n in range(some)) + "".join(f'\na{n}: "x" | "xx"' for n in range(some))
    return rng.choice(
        [
            Case("regex", f"({regex}){{{some}}}"),
            Case("regex", "|".join(f"{regex}{n}" for n in range(many))),
            Case("regex", f"(({regex}){{{few}}}.*){{{few}}}"),
            Case("regex", f"(.*{regex}.*){{{few}}}"),
            Case("regex", "".join(f"(.*{n}.*|{regex})?" for n in range(some))),
            Case("regex", "(" * some + "a" + ")*b?" * some),
            Case("choice", json.dumps([f"{n * 7919 % 100_003}{regex}" for n in range(4 * many)])),
            Case("lark", f"start: r1+\n{rules}"),
            Case("lark", "start: " + " | ".join(f"/{regex}{n}/" for n in range(many))),
            Case("lark", f"start: A\nA: B{{{some}}}\nB: C{{{few}}}\nC: /{regex}/"),
            Case("lark", f"start: a\na: b{{{some}}}\nb: c{{{few}}}\nc: /{regex}/"),
            Case("lark", f"start: {optional}"),
            Case("lark", f'start: s\ns: s s | "a" | {"(" * few}"b"{")?" * few}'),
            Case("lark", 'start: s\ns: s s s | "a" | "aa" | '),
            Case("lark", f"start: A\nA: /.*{regex}.*/ & ~/.*{regex}{regex}.*/ & ~/.{{{few}}}/"),
            Case("lark", f"start: A{{{some}}}\nA: /{regex}/ | ~/{regex}/"),
            Case("gbnf", f'root ::= ([a-z] | "{few}"){{{many}}}'),
            Case("gbnf", "root ::= " + "(" * some + '"a"' + ")*" * some),
        ]
    )


class Mutator:
    """Makes cases from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._schemas = [s for group in ANSWERED.values() for s in group] + [
            case.schema for group in REFUSED.values() for case in group if len(json.dumps(case.schema)) < 2_000
        ]

    def case(self) -> Case:
        rng = self._random
        if rng.random() < 0.1:
            return large(rng)
        kind = rng.choices(("json", "regex", "lark", "gbnf"), (6, 3, 2, 1))[0]
        if kind == "json":
            schema = copy.deepcopy(rng.choice(self._schemas))
            for _ in range(rng.choice((1, 1, 2, 3, 6))):
                schema = self._schema(schema)
            return Case(kind, json.dumps(schema))
        text = rng.choice({"regex": REGEXES, "lark": LARKS, "gbnf": GBNFS}[kind])
        for _ in range(rng.choice((1, 1, 2, 3, 8))):
            text = self._text(text, {"regex": REGEXES, "lark": LARKS, "gbnf": GBNFS}[kind])
        return Case(kind, text[:200_000])

    def _text(self, text: str, others: list[str]) -> str:
        rng = self._random
        here, there = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        match rng.randrange(7):
            case 0:
                return text[:here] + rng.choice(BITS) + text[here:]
            case 1:
                return text[:here] + text[there:]
            case 2:
                return text[:there] + text[here:there] * rng.choice((1, 2, 20)) + text[there:]
            case 3:
                other = rng.choice(others)
                return text[:here] + other[rng.randrange(len(other)) :]
            case 4:
                least, most = rng.choice((0, 1, 2, 30, 100, 900)), rng.choice((2, 30, 300, 2000))
                return f"{text[:here]}({text[here:there]}){{{least},{most}}}{text[there:]}"
            case 5:
                return f"({text})*({rng.choice(others)})"
        return text[:here] + rng.choice(BITS) + rng.choice(BITS) + text[here:]

    def _schema(self, schema: Any) -> Any:
        rng, places = self._random, list(_places(schema))
        if not places or rng.random() < 0.15:
            return self._around(schema)
        holder, key = rng.choice(places)
        match rng.randrange(8):
            case 0:
                holder[key] = rng.choice(NUMBERS)
            case 1:
                holder[key] = self._around(holder[key])
            case 2:
                holder[key] = copy.deepcopy(rng.choice(self._schemas))
            case 3 if isinstance(holder, dict):
                donor = rng.choice(self._schemas)
                holder |= copy.deepcopy(donor) if isinstance(donor, dict) else {"pattern": rng.choice(REGEXES)}
            case 4:
                holder[key] = rng.choice(("#", "#/$defs/a", "#/properties/a", *WORDS))
            case 5 if isinstance(holder, dict):
                holder[rng.choice(BOUNDS)] = rng.choice(NUMBERS)
            case 6 if isinstance(holder, dict):
                regex = rng.choice(REGEXES)
                holder["pattern"] = self._text(regex, REGEXES)
            case _:
                del holder[key]
        return schema

    def _around(self, schema: Any) -> Any:
        rng, several = self._random, _several(self._random)
        again = [copy.deepcopy(schema) for _ in range(several)]
        match rng.randrange(9):
            case 0:
                return {rng.choice(("anyOf", "oneOf", "allOf")): again}
            case 1:
                return {
                    "type": "array",
                    "items": schema,
                    "minItems": rng.choice((0, 1, 50)),
                    "maxItems": rng.choice((50, 4000)),
                }
            case 2:
                return {"type": "object", "properties": {f"{rng.choice(WORDS)}{n}": one for n, one in enumerate(again)}}
            case 3:
                return {"type": "object", "additionalProperties": schema, "patternProperties": {"^x": schema}}
            case 4:
                return {"allOf": [schema, copy.deepcopy(rng.choice(self._schemas))]}
            case 5:
                return {"anyOf": [schema, {"$ref": "#"}, copy.deepcopy(rng.choice(self._schemas))]}
            case 6:
                return {"enum": [n if rng.random() < 0.5 else f"{rng.choice(WORDS)}{n}" for n in range(several * 20)]}
            case 7:
                return {"$ref": "#/$defs/a", "$defs": {"a": schema}, "title": "x"}
        return {"anyOf": [{"type": "string", "pattern": rng.choice(REGEXES)} for _ in range(several)]}


def _several(rng: random.Random) -> int:
    return rng.choice((1, 2, 2, 3, 10, 60))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def compiled_and_driven(compiler: Compiler, case: Case, seed: int) -> tuple[float, float, str]:
    """Seconds to compile it, seconds of the worst mask, and what became of it."""
    began = time.process_time()
    try:
        if case.kind == "lark":
            admit(case.source, "grammar")
        constraint = compiler.compiled(Grammar(case.kind, case.source)).constraint()
    except RequestError as error:
        return time.process_time() - began, 0.0, "library" if "cannot be honoured" in str(error) else "judge"
    took, worst = time.process_time() - began, 0.0
    rng, line = random.Random(seed), np.zeros(WIDTH // 32, np.uint32)
    try:
        for _ in range(TOKENS):
            began = time.process_time()
            constraint.fill(line)
            worst = max(worst, time.process_time() - began)
            allowed = np.flatnonzero(np.unpackbits(line.view(np.uint8), bitorder="little"))
            if constraint.done or not len(allowed):
                break
            began = time.process_time()
            constraint.take(int(rng.choice(allowed)))
            worst = max(worst, time.process_time() - began)
    except ConstraintError:
        return took, worst, "gave up"
    return took, worst, "driven"


def batch(compiler: Compiler, cases: list[Case], first: int) -> Iterator[tuple[int, str, float, float, str]]:
    """Results, each with its number; a case that ended the process comes last, as "died"."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with os.fdopen(writing, "w") as told:
            for number, case in enumerate(cases):
                signal.alarm(120)
                before = _megabytes()
                took, worst, became = compiled_and_driven(compiler, case, first + number)
                print(number, took, worst, max(0, _megabytes() - before), became, sep="\t", file=told, flush=True)
        os._exit(0)
    os.close(writing)
    last = -1
    with os.fdopen(reading) as heard:
        for line in heard:
            number, took, worst, grown, became = line.rstrip("\n").split("\t")
            last = int(number)
            slow = float(took) > COMPILE_SECONDS or float(worst) > MASK_SECONDS or float(grown) > MEGABYTES
            yield last, became, float(took), float(worst), f"{float(grown):.0f} MB" if slow else ""
    _, status = os.waitpid(child, 0)
    if status:
        yield last + 1, "died", 0.0, 0.0, f"status {status}"


def _megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(model: Path, count: int, seed: int, say: Callable[[str], None] = print) -> int:
    """How many were wrong."""
    tokenizer = open_checkpoint(model).tokenizer
    compiler = Compiler(tokenizer, WIDTH, tokenizer.eos)
    compiler.compiled(Grammar("regex", "a"))  # the library's tokenizer is made once, for all processes
    wrong, totals, worst, done = 0, dict.fromkeys(("judge", "library", "driven", "gave up", "died"), 0), [0.0, 0.0], 0
    mutator = Mutator(seed)
    while done < count:
        cases = [mutator.case() for _ in range(min(BATCH, count - done))]
        while cases:
            number = -1
            for number, became, took, mask, slow in batch(compiler, cases, done):
                totals[became] += 1
                worst = [max(worst[0], took), max(worst[1], mask)]
                if slow:
                    wrong += 1
                    say(f"{became}, {took:.2f} s to compile, {mask * 1e3:.0f} ms for a mask, {slow}: {cases[number]}")
            done += number + 1
            cases = cases[number + 1 :]
        if done % 2000 < BATCH:
            say(f"{done}: {totals}, worst {worst[0]:.2f} s to compile and {worst[1] * 1e3:.0f} ms for a mask")
    say(f"{done}: {totals}, worst {worst[0]:.2f} s to compile and {worst[1] * 1e3:.0f} ms for a mask; {wrong} wrong")
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sys.exit(1 if run(given.model, given.count, given.seed) else 0)
