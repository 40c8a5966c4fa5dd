"""Fuzzing of the GGUF reader: small good files, spoiled; whatever comes out, opening one gives a model or one
ModelFileError, in bounded time and memory.

    python tests/fuzz/fuzz_gguf.py --count 1000000 --seed 1

The same seed makes the same inputs. An input that fails is left in the working directory.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from gguf_writer import KINDS, TYPES, Built, Field, Metadata, Tensors, build, tensor_bytes

from headrace.errors import ModelFileError
from headrace.loading.gguf import GGUF

SECONDS = 1.0
BYTES = 64 << 20


def seeds() -> list[Built]:
    """Good files that between them have every metadata type and every tensor type."""
    scalars: Metadata = [
        *[(f"n.{kind}", kind, 1) for kind in KINDS if kind not in ("str", "array")],
        ("general.architecture", "str", "llama"),
        ("general.name", "str", "né 模 😀"),
        ("empty", "str", ""),
    ]
    arrays: Metadata = [
        *[(f"a.{kind}", "array", (kind, [1, 0, 1])) for kind in KINDS if kind not in ("str", "array")],
        ("tokens", "array", ("str", ["a", "", "é", "模型", "😀" * 40])),
        ("none", "array", ("u32", [])),
        ("nested", "array", ("array", [("u8", [1, 2]), ("str", ["x"]), ("array", [("array", [("bool", [True])])])])),
    ]
    long: Metadata = [
        ("vocab", "array", ("str", [f"t{i}" * (i % 3) + "é" * (80 if i % 50 == 0 else 1) for i in range(1100)])),
        ("scores", "array", ("f32", [float(i) for i in range(1100)])),
    ]
    every: Tensors = []
    for i, (name, (_, block, _)) in enumerate(TYPES.items()):
        shape = ((block * 2,), (2, block), (2, 1, block), (1, 2, 1, block))[i % 4]
        every.append((f"blk.{i}.weight", shape, name, tensor_bytes(shape, name, i)))
    aligned: Metadata = [("general.alignment", "u32", 64)]
    return [
        build(scalars, every[:4]),
        build(arrays, every[4:8], version=2),
        build(aligned + scalars + arrays, every[8:], alignment=64),
        build(long, every[:1]),
        build([], []),
    ]


def mutate(rng: random.Random, files: Sequence[Built]) -> bytes:
    """One of the files with one to four faults."""
    file = rng.choice(files)
    data = bytearray(file.data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        rng.choice((_field, _field, _field, _flip, _cut, _splice, _insert, _truncate))(rng, data, file, files)
    return bytes(data)


def _field(rng: random.Random, data: bytearray, file: Built, files: Sequence[Built]) -> None:
    """A length, count, type, dimension or offset becomes another number, often near a boundary."""
    place: Field = rng.choice(list(file.fields.values()))
    old = int.from_bytes(data[place.at : place.at + place.size], "little")
    bit = rng.choice((7, 8, 15, 16, 20, 31, 32, 40, 60, 62, 63, 64))
    new = rng.choice(
        (
            rng.randrange(64),
            (1 << bit) + rng.randrange(-2, 3),
            old + rng.choice((-32, -8, -1, 1, 8, 32)),
            len(data) + rng.randrange(-64, 65),
            old * rng.choice((2, 3, 256)),
            rng.getrandbits(64),
        )
    )
    data[place.at : place.at + place.size] = (new % (1 << 8 * place.size)).to_bytes(place.size, "little")


def _flip(rng: random.Random, data: bytearray, file: Built, files: Sequence[Built]) -> None:
    for _ in range(rng.randrange(1, 9)):
        if data:
            data[rng.randrange(len(data))] = rng.choice((0, 1, 8, 9, 127, 128, 255, rng.randrange(256)))


def _cut(rng: random.Random, data: bytearray, file: Built, files: Sequence[Built]) -> None:
    start = rng.randrange(len(data) + 1)
    del data[start : start + rng.randrange(1, 65)]


def _splice(rng: random.Random, data: bytearray, file: Built, files: Sequence[Built]) -> None:
    """A part of this or another file over or between the bytes: a key twice, a tensor's info in the wrong place."""
    other = rng.choice((file, rng.choice(files))).data
    start = rng.randrange(len(other))
    part = other[start : start + rng.randrange(1, 200)]
    at = rng.randrange(len(data) + 1)
    data[at : at + rng.choice((0, len(part)))] = part


def _insert(rng: random.Random, data: bytearray, file: Built, files: Sequence[Built]) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.choice((bytes(rng.randrange(1, 40)), b"\xff" * rng.randrange(1, 9), rng.randbytes(8)))


def _truncate(rng: random.Random, data: bytearray, file: Built, files: Sequence[Built]) -> None:
    del data[rng.randrange(len(data) + 1) :]


def open_whole(path: Path) -> str:
    """Opens the file and uses everything it has: "good", or the error's text."""
    try:
        model = GGUF(path)
    except ModelFileError as error:
        text = str(error)
        if not text.startswith(f"{path}: "):
            raise AssertionError(f"the error does not begin with the file's path: {text[:200]}") from None
        return text
    for value in model.metadata.values():
        repr(list(value) if not isinstance(value, (int, float, str, list)) else value)
    for name, info in model.tensors.items():
        tensor = model.read(name)
        assert tensor.nbytes == info.nbytes
        assert tensor.dense().shape == info.shape
    model.close()
    return "good"


def check(path: Path, data: bytes) -> str:
    """Runs one input; AssertionError where it takes too long or too much, any other error is the reader's fault."""
    path.write_bytes(data)
    tracemalloc.reset_peak()
    before, start = tracemalloc.get_traced_memory()[0], time.process_time()
    outcome = open_whole(path)
    seconds, peak = time.process_time() - start, tracemalloc.get_traced_memory()[1] - before
    assert seconds < SECONDS, f"took {seconds:.2f} s of a core"
    assert peak < BYTES + len(data), f"took {peak:,} bytes"
    return outcome


def fuzz(count: int, seed: int, folder: Path, *, progress: bool = False) -> Counter[str]:
    """Runs `count` inputs; how many were good and how many were refused. Raises at the first one that fails."""
    rng = random.Random(seed)
    files = seeds()
    outcomes: Counter[str] = Counter()
    path = folder / "fuzzed.gguf"
    started = time.monotonic()
    tracing = tracemalloc.is_tracing()
    tracemalloc.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number in range(count):
                data = mutate(rng, files)
                try:
                    outcome = check(path, data)
                except BaseException as error:
                    left = Path(f"fuzz-gguf-{seed}-{number}.gguf")
                    left.write_bytes(data)
                    raise AssertionError(f"input {number} of seed {seed}, left in {left}: {error!r}") from error
                outcomes["good" if outcome == "good" else "refused"] += 1
                if progress and number % 10_000 == 9_999:
                    rate = (number + 1) / (time.monotonic() - started)
                    print(f"{number + 1:,} inputs, {rate:,.0f} a second, {dict(outcomes)}", file=sys.stderr, flush=True)
    finally:
        if not tracing:
            tracemalloc.stop()
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description="fuzz the GGUF reader")
    parser.add_argument("--count", type=int, default=10_000, help="inputs to run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(dict(fuzz(options.count, options.seed, Path(folder), progress=True)))


if __name__ == "__main__":
    main()
