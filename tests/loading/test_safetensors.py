"""The reader of folders with safetensors: what it gives of good ones, and one clear error for each kind of bad one."""

from __future__ import annotations

import json
import os
import random
import time
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from headrace.errors import ModelFileError
from headrace.formats import FORMATS
from headrace.loading.safetensors import Safetensors
from tests.loading.bounds import BYTES, SECONDS, refused

RNG = np.random.default_rng(0)
TENSORS: dict[str, np.ndarray] = {
    "embed.weight": RNG.standard_normal((7, 6)).astype(ml_dtypes.bfloat16),
    "norm.weight": RNG.standard_normal(6).astype(np.float32),
    "proj.weight": RNG.standard_normal((2, 3, 4)).astype(np.float16),
    "scale": np.array(1.5, np.float32),
}


def save(path: Path, tensors: Mapping[str, np.ndarray], **metadata: str) -> None:
    safetensors.numpy.save_file(dict(tensors), path, metadata or None)


def folder(path: Path, *, config: object = None) -> Path:
    """A folder with a config.json and nothing else."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"} if config is None else config))
    return path


def single(path: Path, tensors: Mapping[str, np.ndarray] = TENSORS) -> Path:
    save(folder(path) / "model.safetensors", tensors)
    return path


def sharded(path: Path, parts: int = 2, *, tensors: Mapping[str, np.ndarray] = TENSORS) -> Path:
    """A folder with an index and shards, tensors dealt out one by one."""
    folder(path)
    names = [f"model-{i + 1:05d}-of-{parts:05d}.safetensors" for i in range(parts)]
    weight_map = {tensor: names[i % parts] for i, tensor in enumerate(tensors)}
    for name in names:
        save(path / name, {tensor: tensors[tensor] for tensor, file in weight_map.items() if file == name})
    write_index(path, weight_map)
    return path


def write_index(path: Path, weight_map: object) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def raw(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    """A folder whose weights have this header, as text, bytes or what json makes of it."""
    if not isinstance(header, (str, bytes)):
        header = json.dumps(header)
    text = header.encode() if isinstance(header, str) else header
    size = len(text) if length is None else length
    (folder(path) / "model.safetensors").write_bytes(size.to_bytes(8, "little") + text + data)
    return path


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8), **more: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file()) if path.is_dir() else 0


def refuse(path: Path, match: str | None) -> str:
    """The folder is refused, with one error, in the bounds that hold for any file."""
    return refused(Safetensors, path, match, size=size_of(path))


# ---- what it gives


@pytest.mark.parametrize("make", [single, sharded], ids=["single", "sharded"])
def test_tensors(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    source = Safetensors(make(tmp_path / "m"))
    assert source.kind == "safetensors"
    assert source.path == tmp_path / "m"
    assert source.metadata == {"model_type": "llama"}
    assert set(source.tensors) == set(TENSORS)
    names = {"bfloat16": "BF16", "float32": "F32", "float16": "F16"}
    for name, expected in TENSORS.items():
        info, found = source.tensors[name], source.read(name)
        assert (info.name, info.shape, info.nbytes) == (name, expected.shape, expected.nbytes)
        assert info.format == names[expected.dtype.name]
        assert type(found) is FORMATS[info.format]
        assert found.data.dtype == np.uint8
        assert not found.data.flags.writeable
        assert found.data.tobytes() == expected.tobytes()
        assert found.dense().shape == expected.shape
        np.testing.assert_array_equal(found.dense(), expected.astype(np.float32))
    with pytest.raises(KeyError):
        source.read("lm_head.weight")


def test_views_are_of_the_mapped_file(tmp_path: Path) -> None:
    source = Safetensors(single(tmp_path / "m", {"a": np.zeros((1000, 1000), np.float32)}))
    tracemalloc.start()
    try:
        found = source.read("a")
        assert tracemalloc.get_traced_memory()[1] < 10_000
    finally:
        tracemalloc.stop()
    source.close()
    assert found.data.size == 4_000_000
    assert not found.dense().any()
    with pytest.raises(ValueError, match="closed"):
        source.read("a")


def test_any_safetensors_without_an_index(tmp_path: Path) -> None:
    folder(tmp_path / "m")
    save(tmp_path / "m" / "b.safetensors", {"b": TENSORS["scale"]})
    save(tmp_path / "m" / "a.safetensors", {"a": TENSORS["scale"]})
    assert list(Safetensors(tmp_path / "m").tensors) == ["a", "b"]


def test_the_single_file_goes_before_others(tmp_path: Path) -> None:
    """As in transformers."""
    sharded(tmp_path / "m")
    save(tmp_path / "m" / "consolidated.safetensors", {"other": TENSORS["scale"]})
    assert set(Safetensors(tmp_path / "m").tensors) == set(TENSORS)
    save(tmp_path / "m" / "model.safetensors", {"a": TENSORS["scale"]})
    assert list(Safetensors(tmp_path / "m").tensors) == ["a"]


def test_shards_that_are_symlinks(tmp_path: Path) -> None:
    sharded(tmp_path / "m")
    for path in list((tmp_path / "m").glob("*.safetensors")):
        path.symlink_to(path.rename(tmp_path / path.name))
    assert set(Safetensors(tmp_path / "m").tensors) == set(TENSORS)


def test_free_metadata_is_passed_over(tmp_path: Path) -> None:
    save(folder(tmp_path / "m") / "model.safetensors", TENSORS, format="pt", note='{"a": "}"}')
    assert set(Safetensors(tmp_path / "m").tensors) == set(TENSORS)


def test_a_padded_header(tmp_path: Path) -> None:
    source = Safetensors(raw(tmp_path / "m", json.dumps({"a": entry()}) + " " * 13, np.ones(2, np.float32).tobytes()))
    assert source.read("a").dense().tolist() == [1, 1]


@pytest.mark.parametrize("dtype", ["I64", "F64", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "BOOL", "F4", "I32", "C64"])
def test_other_dtypes_are_refused_when_read(tmp_path: Path, dtype: str) -> None:
    bits = {"F4": 4, "I32": 32, "I64": 64, "F64": 64, "C64": 64}.get(dtype, 8)
    header = {"position_ids": entry(dtype, (2, 4), (0, bits)), "a": entry("F32", (2,), (bits, bits + 8))}
    source = Safetensors(raw(tmp_path / "m", header, bytes(bits + 8)))
    assert source.read("a").shape == (2,)
    assert source.tensors["position_ids"].format == dtype
    with pytest.raises(
        ModelFileError, match=f"'position_ids' is {dtype}, which cannot be read; known are F32, F16, BF16"
    ):
        source.read("position_ids")


# ---- what it refuses: folders


def test_no_folder(tmp_path: Path) -> None:
    refuse(tmp_path / "none", "is not a folder")
    (tmp_path / "file").write_text("x")
    refuse(tmp_path / "file", "is not a folder")


def test_a_missing_config(tmp_path: Path) -> None:
    (single(tmp_path / "m") / "config.json").unlink()
    refuse(tmp_path / "m", "config.json: does not exist")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "config.json: is empty"),
        ("{", "config.json: the file is not good JSON"),
        ('{"a": 1', "not good JSON"),
        ("[]", "must be a JSON object, not list"),
        ("null", "must be a JSON object, not NoneType"),
        ('{"a": 1, "a": 2}', "the key 'a' is there twice"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deep"),
        ('{"a": ' + "9" * 5000 + "}", "not good JSON"),
        (b'{"a": "\xff"}', "not UTF-8 at its byte 7"),
        ("{}" * 2, "not good JSON: Extra data"),
    ],
)
def test_a_broken_config(tmp_path: Path, text: str | bytes, match: str) -> None:
    (single(tmp_path / "m") / "config.json").write_bytes(text.encode() if isinstance(text, str) else text)
    refuse(tmp_path / "m", match)


def test_no_weights(tmp_path: Path) -> None:
    folder(tmp_path / "m")
    refuse(tmp_path / "m", r"has no \*.safetensors file$")
    (tmp_path / "m" / "pytorch_model.bin").write_bytes(b"x")
    refuse(tmp_path / "m", "pytorch_model.bin is a pickle")
    (tmp_path / "m" / "adapter_model.safetensors").write_bytes(b"x")
    refuse(tmp_path / "m", "no .*of a whole model: adapter_model.safetensors is an adapter")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_pipes_do_not_block(tmp_path: Path, name: str) -> None:
    path = tmp_path / "m"
    sharded(path) if "index" in name else single(path)
    (path / name).unlink()
    os.mkfifo(path / name)
    refuse(path, f"{name}: is a pipe")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_symlinks_to_nothing(tmp_path: Path, name: str) -> None:
    path = tmp_path / "m"
    sharded(path) if "index" in name else single(path)
    (path / name).unlink()
    (path / name).symlink_to(tmp_path / "gone")
    refuse(path, f"{name}: is a symbolic link to .*gone, which does not exist")


# ---- what it refuses: indexes


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (sharded(tmp_path / "m", 3) / "model-00002-of-00003.safetensors").unlink()
    refuse(tmp_path / "m", "'model-00002-of-00003.safetensors', which holds 1 of the tensors, is missing")


def test_a_shard_that_is_a_symlink_to_nothing(tmp_path: Path) -> None:
    shard = sharded(tmp_path / "m") / "model-00002-of-00002.safetensors"
    shard.unlink()
    shard.symlink_to(tmp_path / "gone")
    refuse(tmp_path / "m", "model-00002-of-00002.safetensors: is a symbolic link")


def index_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]


def test_a_tensor_that_is_only_in_the_index(tmp_path: Path) -> None:
    path = sharded(tmp_path / "m")
    write_index(path, index_of(path) | {"ghost": "model-00001-of-00002.safetensors"})
    refuse(path, "tensor 'ghost' should be in model-00001-of-00002.safetensors, but is in no file")


def test_a_tensor_that_is_in_another_shard(tmp_path: Path) -> None:
    path = sharded(tmp_path / "m")
    write_index(path, index_of(path) | {"scale": "model-00001-of-00002.safetensors"})
    refuse(path, "tensor 'scale' should be in model-00001-.*, but is in model-00002-")


def test_a_tensor_that_is_not_in_the_index(tmp_path: Path) -> None:
    path = sharded(tmp_path / "m")
    write_index(path, {tensor: file for tensor, file in index_of(path).items() if tensor != "scale"})
    refuse(path, "tensor 'scale' is in model-00002-of-00002.safetensors, but not in the index")


@pytest.mark.parametrize("indexed", [True, False])
def test_a_tensor_in_two_shards(tmp_path: Path, indexed: bool) -> None:
    path = sharded(tmp_path / "m")
    save(path / "model-00002-of-00002.safetensors", TENSORS)
    if not indexed:
        (path / "model.safetensors.index.json").unlink()
    refuse(path, "00002.safetensors: tensor 'embed.weight' is in model-00001-of-00002.safetensors too")


@pytest.mark.parametrize("weight_map", [None, [], {}, "x", 1])
def test_an_index_without_a_map(tmp_path: Path, weight_map: object) -> None:
    path = sharded(tmp_path / "m")
    write_index(path, weight_map)
    refuse(path, '"weight_map" must be an object')


@pytest.mark.parametrize("file", ["../m/x.safetensors", "/etc/passwd", "config.json", "", 1, None, "a\0.safetensors"])
def test_an_index_that_leads_out_of_the_folder(tmp_path: Path, file: object) -> None:
    path = sharded(tmp_path / "m")
    write_index(path, index_of(path) | {"scale": file})
    refuse(path, r"tensor 'scale' must be in a \*.safetensors file of the folder, not")


def test_an_index_with_half_a_character(tmp_path: Path) -> None:
    path = sharded(tmp_path / "m")
    write_index(path, index_of(path) | {"\ud800": "\ud800.safetensors"})
    refuse(path, "is missing from the folder").encode()


# ---- what it refuses: headers

GOOD = {"a": entry("F32", (2, 3), (0, 24)), "b": entry("BF16", (4,), (24, 32)), "c": entry("F16", (), (32, 34))}


def test_the_header_to_be_spoiled_is_good(tmp_path: Path) -> None:
    assert len(Safetensors(raw(tmp_path / "m", GOOD, bytes(34))).tensors) == 3


@pytest.mark.parametrize("length", [2**60, 2**64 - 1, 2**63, 2**40, 10**6, 1])
def test_header_lengths_that_lie(tmp_path: Path, length: int) -> None:
    refuse(raw(tmp_path / "m", GOOD, bytes(34), length=length), None if length == 1 else "it is cut short, or not")


@pytest.mark.parametrize("size", range(8))
def test_files_too_short_for_a_length(tmp_path: Path, size: int) -> None:
    (folder(tmp_path / "m") / "model.safetensors").write_bytes(bytes(size))
    refuse(tmp_path / "m", "it is cut short, or not" if size else "is empty")


def test_truncated_anywhere(tmp_path: Path) -> None:
    path = raw(tmp_path / "m", GOOD, bytes(34)) / "model.safetensors"
    for size in reversed(range(path.stat().st_size)):
        os.truncate(path, size)
        with pytest.raises(ModelFileError, match=r"cut short|is empty"):
            Safetensors(tmp_path / "m")


@pytest.mark.parametrize("extra", [1, 100])
def test_bytes_that_belong_to_no_tensor(tmp_path: Path, extra: int) -> None:
    refuse(raw(tmp_path / "m", GOOD, bytes(34 + extra)), "must be .* bytes long")


@pytest.mark.parametrize(
    ("name", "spoiled", "match"),
    [
        ("a", entry("F32", (2, 3), (0, 20)), "'a': F32 .* takes 192 bits, but its data_offsets are 20 bytes apart"),
        ("a", entry("F32", (2, 3), (24, 0)), "are -24 bytes apart"),
        ("a", entry("F32", (2, 3), (8, 32)), "'b' starts at byte|'a' starts at byte"),
        ("b", entry("BF16", (4,), (20, 28)), "'b' starts at byte"),
        ("b", entry("BF16", (4,), (26, 34)), "starts at byte"),
        ("c", entry("F16", (), (2**62, 2**62 + 2)), "'c' starts at byte"),
        ("c", entry("F16", (2**62,), (32, 32 + 2**63)), "'c': its data_offsets must be"),
        ("c", entry("F16", (2**61,), (32, 32 + 2**62)), "must be .* bytes long or more by its header"),
        ("a", entry("F32", (0, 3), (0, 0)), "'a': its shape must be a list"),
        ("a", entry("F32", (2, -3), (0, 24)), "'a': its shape must be"),
        ("a", entry("F32", (2, 3.0), (0, 24)), "'a': its shape must be"),
        ("a", entry("F32", (6, True), (0, 24)), "'a': its shape must be"),
        ("a", entry("F32", (10**300,), (0, 24)), "'a': its shape must be"),
        ("a", entry("F32", 6, (0, 24)), "'a': its shape must be"),
        ("a", entry("F32", (6,) + (1,) * 8, (0, 24)), "at most 8"),
        ("a", entry("F32", (2, 3), (0, 24, 24)), "'a': its data_offsets must be two"),
        ("a", entry("F32", (2, 3), (-24, 0)), "'a': its data_offsets must be two"),
        ("a", entry("F32", (2, 3), (0, "24")), "'a': its data_offsets must be two"),
        ("a", entry("F32", (2, 3), None), "'a': its data_offsets must be two"),
        ("a", entry("F7", (2, 3), (0, 24)), "'a': has the dtype 'F7', which safetensors does not have"),
        ("a", entry(32, (2, 3), (0, 24)), "'a': its dtype must be a string, not int"),
        ("a", entry("F4", (3,), (0, 1)), "'a': F4 .* takes 12 bits"),
        ("a", entry("F32", (2, 3), (0, 24), more=1), "'a': its entry must be"),
        ("a", {"dtype": "F32", "shape": [2, 3]}, "'a': its entry must be"),
        ("a", [], "'a': its entry must be"),
        ("__metadata__", {"a": 1}, '"__metadata__" must be an object of strings'),
        ("__metadata__", [], '"__metadata__" must be an object of strings'),
    ],
)
def test_entries_that_lie(tmp_path: Path, name: str, spoiled: object, match: str) -> None:
    refuse(raw(tmp_path / "m", GOOD | {name: spoiled}, bytes(34)), match)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"", "not good JSON"),
        (b"[]", "must be a JSON object"),
        (b"\0" * 40, "not good JSON"),
        (b'{"a": \xff}', "not UTF-8"),
        (b'{"a": {"dtype": "F32", "dtype": "F16", "shape": [], "data_offsets": [0, 2]}}', "key 'dtype' is there twice"),
        (b'{"a": {}, "a": {}}', "key 'a' is there twice"),
        (b'{"a": ' + b'{"a":' * 50_000, "nested too deep"),
    ],
)
def test_headers_that_are_not_good(tmp_path: Path, text: bytes, match: str) -> None:
    refuse(raw(tmp_path / "m", text, bytes(2)), match)


WORST: dict[str, Callable[[], bytes]] = {
    "lists": lambda: b'{"a": [' + b"[]," * 10_000_000 + b"[]]}",
    "millions of lists": lambda: b'{"a": [' + b"[]," * 3_000_000 + b"[]]}",
    "fewer lists": lambda: b'{"a": [' + b"[]," * 200_000 + b"[]]}",
    "objects": lambda: b'{"a": [' + b'{"a":1},' * 90_000 + b"{}]}",
    "numbers": lambda: b'{"a": [' + b"1.5," * 400_000 + b"1]}",
    "keys": lambda: b"{" + b",".join(b'"%d":1' % i for i in range(300_000)) + b"}",
    "fewer keys": lambda: b"{" + b",".join(b'"%d":1' % i for i in range(130_000)) + b"}",
    "a long string": lambda: b'{"a": "' + "é".encode() * 12_000_000 + b'"}',
    "a long string of emoji": lambda: b'{"a": "' + "😀".encode() * 8_000_000 + b'"}',
    "blanks": lambda: b'{"a":' + b" " * 30_000_000 + b"}",
}


@pytest.mark.parametrize("name", WORST)
@pytest.mark.parametrize("file", ["model.safetensors", "model.safetensors.index.json", "config.json"])
def test_the_worst_is_refused_in_bounds(tmp_path: Path, name: str, file: str) -> None:
    text = WORST[name]()
    path = sharded(tmp_path / "m") if "index" in file else single(tmp_path / "m")
    (path / file).write_bytes((len(text).to_bytes(8, "little") if file.endswith("safetensors") else b"") + text)
    if file == "config.json":
        (path / "model.safetensors").unlink()  # JSON that is only big is a config as any other
    refuse(path, None)


# ---- fuzzing, the smaller sister of fuzz_gguf.py


def spoil(rng: random.Random, header: str, data: bytes) -> bytes:
    text = bytearray(header.encode())
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        match rng.randrange(6):
            case 0:
                text[rng.randrange(len(text))] = rng.choice(b'{}[]",:0123456789 \x00\xff\\')
            case 1:
                start = rng.randrange(len(text))
                del text[start : start + rng.randrange(1, 30)]
            case 2:
                start = rng.randrange(len(text))
                at = rng.randrange(len(text))
                text[at:at] = text[start : start + rng.randrange(1, 80)]
            case 3 | 4:
                digits = [i for i in range(len(text)) if text[i : i + 1].isdigit()]
                if digits:
                    at = rng.choice(digits)
                    number = rng.choice((rng.randrange(40), -1, 2**31, 2**60, 2**63, 2**64, 10**400, 0.5))
                    text[at : at + 1] = str(number).encode()
            case 5:
                data = data[: rng.randrange(len(data) + 1)] + bytes(rng.choice((0, 0, 1, 50)))
        if not text:
            text = bytearray(b"{")
    length = rng.choice((len(text),) * 20 + (len(text) - 1, len(text) + rng.randrange(40), rng.getrandbits(64)))
    return length.to_bytes(8, "little") + bytes(text) + data


def test_thousands_of_spoiled_headers(tmp_path: Path) -> None:
    rng = random.Random(0)
    header, path = json.dumps(GOOD | {"__metadata__": {"format": "pt"}}), folder(tmp_path / "m")
    refused = good = 0
    tracemalloc.start()
    try:
        for number in range(2000):
            (path / "model.safetensors").write_bytes(spoil(rng, header, bytes(34)))
            tracemalloc.reset_peak()
            start = time.process_time()
            try:
                source = Safetensors(path)
                for name in source.tensors:
                    if source.tensors[name].format in ("F32", "F16", "BF16"):
                        source.read(name).dense()
                good += 1
            except ModelFileError:
                refused += 1
            assert time.process_time() - start < SECONDS, f"input {number}"
            assert tracemalloc.get_traced_memory()[1] < BYTES, f"input {number}"
    finally:
        tracemalloc.stop()
    assert refused > 1500
    assert good > 10
