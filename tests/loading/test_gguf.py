"""The GGUF reader: what it gives of good files, and one clear error for each kind of bad one (case W7)."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from gguf_writer import KINDS, TYPES, Built, Metadata, Tensors, build, tensor_bytes

from headrace.errors import ModelFileError
from headrace.formats import FORMATS, Format
from headrace.loading.gguf import GGUF
from tests.loading.bounds import refused

SCALARS: Metadata = [
    *[("n.u8", "u8", 255), ("n.i8", "i8", -128), ("n.u16", "u16", 65535), ("n.i16", "i16", -32768)],
    *[("n.u32", "u32", 2**32 - 1), ("n.i32", "i32", -(2**31)), ("n.u64", "u64", 2**64 - 1), ("n.i64", "i64", -(2**63))],
    *[("n.f32", "f32", 0.5), ("n.f64", "f64", 0.1), ("n.true", "bool", True), ("n.false", "bool", False)],
    *[("n.str", "str", "né 模型 😀\0x"), ("n.empty", "str", "")],
]
VOCAB = [("é" * (i % 200) if i % 7 == 0 else f"t{i}") for i in range(3000)]
ONE: Tensors = [("a.weight", (2, 32), "Q4_0", tensor_bytes((2, 32), "Q4_0"))]


def write(path: Path, file: Built | bytes) -> Path:
    path.write_bytes(bytes(file.data) if isinstance(file, Built) else file)
    return path


def refuse(path: Path, match: str | None) -> str:
    """The file is refused, with one error, in the bounds that hold for any file."""
    return refused(GGUF, path, match, size=path.stat().st_size if path.exists() else 0)


# ---- what it gives


def test_scalars(tmp_path: Path) -> None:
    source = GGUF(write(tmp_path / "m.gguf", build(SCALARS, [])))
    assert dict(source.metadata) == {key: value for key, _, value in SCALARS}
    assert all(type(source.metadata[key]) is type(value) for key, _, value in SCALARS)
    assert source.kind == "gguf"
    assert source.path == tmp_path / "m.gguf"
    assert dict(source.tensors) == {}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("str", "array")])
@pytest.mark.parametrize("count", [0, 1, 1024, 1025, 5000])
def test_arrays_of_numbers(tmp_path: Path, kind: str, count: int) -> None:
    values = [bool(i % 2) if kind == "bool" else i % 120 for i in range(count)]
    source = GGUF(write(tmp_path / "m.gguf", build([("a", "array", (kind, values)), ("end", "u8", 1)], [])))
    found = source.metadata["a"]
    assert source.metadata["end"] == 1
    assert type(found) is (list if count <= 1024 else np.ndarray)
    assert list(found) == values
    if count > 1024:
        assert not found.flags.writeable
        assert found.dtype.kind == {"b": "b", "u": "u", "i": "i", "f": "f"}[kind[0]]
    elif count:
        assert type(found[0]) is type(values[0]) or kind[0] == "f"


def test_a_short_array_of_strings_is_a_list(tmp_path: Path) -> None:
    tags = ["a", "", "é"]
    source = GGUF(write(tmp_path / "m.gguf", build([("tags", "array", ("str", tags))], [])))
    assert source.metadata["tags"] == tags


def test_a_long_array_of_strings_is_lazy(tmp_path: Path) -> None:
    file = build([("vocab", "array", ("str", VOCAB)), ("end", "u8", 1)], [])
    source = GGUF(write(tmp_path / "m.gguf", file))
    found = source.metadata["vocab"]
    assert source.metadata["end"] == 1
    source.close()
    assert not isinstance(found, list)
    assert len(found) == len(VOCAB)
    assert list(found) == VOCAB
    assert [found[i] for i in (0, 7, 2999, -1, -3000)] == [VOCAB[i] for i in (0, 7, 2999, -1, -3000)]
    assert found[5:9] == VOCAB[5:9]
    assert found[::-500] == VOCAB[::-500]
    assert found[np.int64(14)] == VOCAB[14]
    assert "t2998" in found
    assert found.index("t9") == 9
    assert "3,000 strings" in repr(found)
    for index in (3000, -3001):
        with pytest.raises(IndexError):
            found[index]


def test_nested_arrays(tmp_path: Path) -> None:
    nested = [("u8", [1, 2]), ("str", ["x", "y"]), ("array", [("array", [("bool", [True])]), ("f32", [])])]
    source = GGUF(write(tmp_path / "m.gguf", build([("n", "array", ("array", nested))], [])))
    assert source.metadata["n"] == [[1, 2], ["x", "y"], [[[True]], []]]


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
def test_tensors_of_every_type(tmp_path: Path, version: int, alignment: int) -> None:
    tensors: Tensors = []
    for i, (name, (_, block, _)) in enumerate(TYPES.items()):
        shape = ((2 * block,), (3, block), (2, 3, block), (1, 2, 3, block))[i % 4]
        tensors.append((f"{name}.weight", shape, name, tensor_bytes(shape, name, i)))
    metadata: Metadata = [("general.alignment", "u32", alignment)] if alignment != 32 else []
    source = GGUF(write(tmp_path / "m.gguf", build(metadata, tensors, version=version, alignment=alignment)))
    assert list(source.tensors) == [name for name, *_ in tensors]
    for name, shape, kind, data in tensors:
        info, found = source.tensors[name], source.read(name)
        assert (info.name, info.shape, info.format, info.nbytes) == (name, shape, kind, len(data))
        assert type(found) is FORMATS[kind]
        assert found.shape == shape
        assert found.data.tobytes() == data
        assert not found.data.flags.writeable
    with pytest.raises(KeyError):
        source.read("output.weight")


def test_tensors_outlive_the_source(tmp_path: Path) -> None:
    source = GGUF(write(tmp_path / "m.gguf", build([], ONE)))
    found = source.read("a.weight")
    source.close()
    source.close()
    assert found.data.tobytes() == ONE[0][3]
    with pytest.raises(ValueError, match="closed"):
        source.read("a.weight")


def test_a_missing_padding_behind_the_last_tensor_does_not_matter(tmp_path: Path) -> None:
    file = build([], ONE)
    file.pad(32)
    assert GGUF(write(tmp_path / "padded.gguf", file)).read("a.weight").data.tobytes() == ONE[0][3]


# ---- real files (case W2)


def assert_equal_numbers(tensor: Format, data: np.ndarray, lines: int) -> None:
    """The numbers of the last `lines` lines are what gguf-py makes of the data, bit for bit."""
    if len(tensor.shape) > 1:
        tensor, data = tensor.shard(slice(-lines, None)), data[-lines:]
    expected = dequantize(data, gguf.GGMLQuantizationType[tensor.name]).reshape(tensor.shape)
    np.testing.assert_array_equal(tensor.dense().view(np.uint32), expected.view(np.uint32))


def compare_with_gguf(path: Path, *, most_of_a_type: int, lines: int) -> Counter[str]:
    """Tensors of a real file against gguf-py's reader and arithmetic; how many of each type the file has."""
    source, other = GGUF(path), gguf.GGUFReader(path)
    assert {t.name: (tuple(reversed(t.shape.tolist())), t.tensor_type.name) for t in other.tensors} == {
        name: (info.shape, info.format) for name, info in source.tensors.items()
    }
    compared: Counter[str] = Counter()
    for theirs in other.tensors:
        if compared[theirs.tensor_type.name] < most_of_a_type:
            compared[theirs.tensor_type.name] += 1
            assert_equal_numbers(source.read(theirs.name), theirs.data, lines)
    for key, theirs in other.fields.items():
        if not key.startswith("GGUF.") and len(theirs.data) < 50_000:  # long lists of strings take gguf-py seconds
            np.testing.assert_array_equal(source.metadata[key], theirs.contents())
    return Counter(info.format for info in source.tensors.values())


def test_smollm2_whole(smollm2: Path) -> None:
    """Every tensor, and all metadata, of which tokens and merges are 49,152 and 48,900 strings."""
    assert len(compare_with_gguf(smollm2, most_of_a_type=1000, lines=1 << 20)) >= 3


def test_qwen_mixes_types(test_model: Callable[[str], Path]) -> None:
    types = compare_with_gguf(test_model("qwen2.5-coder-0.5b"), most_of_a_type=3, lines=1000)
    assert {name: types[name] for name in ("Q5_0", "Q8_0", "Q4_K", "Q6_K")} == {
        "Q5_0": 133,
        "Q8_0": 13,
        "Q4_K": 12,
        "Q6_K": 12,
    }


@pytest.mark.parametrize("name", ["gemma3-270m", "qwen2.5-coder-1.5b"])
def test_numbers_of_other_real_files(test_model: Callable[[str], Path], name: str) -> None:
    """Only the numbers: gguf-py takes ten seconds to read a big vocabulary."""
    source = GGUF(test_model(name))
    compared: Counter[str] = Counter()
    for tensor in map(source.read, source.tensors):
        if compared[tensor.name] < 3:
            compared[tensor.name] += 1
            assert_equal_numbers(tensor, tensor.data, lines=1000)
    assert len(compared) >= 3


def test_a_big_vocabulary_opens_fast(test_model: Callable[[str], Path]) -> None:
    path = test_model("gemma3-270m")
    tracemalloc.start()
    try:
        source = GGUF(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(source.metadata["tokenizer.ggml.tokens"]) == 262_144
    assert peak < 32 << 20
    times = []
    for _ in range(3):
        start = time.process_time()
        GGUF(path)
        times.append(time.process_time() - start)
    assert min(times) < 0.150


# ---- what it refuses: files that are none


def test_no_file(tmp_path: Path) -> None:
    refuse(tmp_path / "none.gguf", "does not exist")


def test_a_symlink_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "link.gguf").symlink_to(tmp_path / "gone.gguf")
    assert "gone.gguf" in refuse(tmp_path / "link.gguf", "symbolic link to .*, which does not exist")


def test_a_symlink_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").symlink_to(tmp_path / "a.gguf")
    with pytest.raises(ModelFileError, match="cannot be read"):
        GGUF(tmp_path / "a.gguf")


def test_a_symlink_to_a_model(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", build([], ONE))
    (tmp_path / "link.gguf").symlink_to(tmp_path / "m.gguf")
    assert list(GGUF(tmp_path / "link.gguf").tensors) == ["a.weight"]


def test_an_empty_file(tmp_path: Path) -> None:
    refuse(write(tmp_path / "m.gguf", b""), "is empty")


def test_a_folder(tmp_path: Path) -> None:
    refuse(tmp_path, "is a folder, not a file")


@pytest.mark.timeout(20)
def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    refuse(tmp_path / "m.gguf", "is a pipe, not a file")


def test_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path may have 107 bytes
    with socket.socket(socket.AF_UNIX) as end:
        end.bind("m.gguf")
        refuse(tmp_path / "m.gguf", "is a socket, not a file")


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null"])
def test_a_device(device: str) -> None:
    refuse(Path(device), "is a device, not a file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", build([], ONE)).chmod(0)
    refuse(tmp_path / "m.gguf", "cannot be read: Permission denied")


def test_a_path_with_a_nul() -> None:
    with pytest.raises(ModelFileError, match="cannot be read"):
        GGUF(Path("m\0.gguf"))


@pytest.mark.parametrize("start", [b"G", b"GGU", b"GGML", b"PK\3\4" + bytes(100), bytes(100)])
def test_something_else(tmp_path: Path, start: bytes) -> None:
    assert repr(start[:4]) in refuse(write(tmp_path / "m.gguf", start), "is not a GGUF file")


def test_a_git_lfs_pointer(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    refuse(write(tmp_path / "m.gguf", pointer), "Git LFS pointer")


@pytest.mark.parametrize("version", [0, 1, 4, 2**32 - 1])
def test_other_versions(tmp_path: Path, version: int) -> None:
    assert f"version {version}" in refuse(write(tmp_path / "m.gguf", build([], ONE).put("version", version)), "2 and 3")


def test_big_endian(tmp_path: Path) -> None:
    refuse(write(tmp_path / "m.gguf", b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(100)), "big-endian")


# ---- what it refuses: metadata

PAIRS: Metadata = [
    ("name", "str", "x" * 20),
    ("flags", "array", ("bool", [True, False])),
    ("flag", "bool", True),
    ("tags", "array", ("str", ["a", "b"])),
    ("nested", "array", ("array", [("u8", [1])])),
    ("vocab", "array", ("str", VOCAB)),
    ("scores", "array", ("f32", [0.0] * 2000)),
]

HUGE = [2**63, 2**64 - 1, 2**60, 2**40]


@pytest.fixture(scope="module")
def good() -> Built:
    return build(PAIRS, ONE)


def test_the_file_to_be_spoiled_is_good(tmp_path: Path, good: Built) -> None:
    assert len(GGUF(write(tmp_path / "m.gguf", good)).metadata) == len(PAIRS)


@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize(
    ("field", "match"),
    [
        ("pairs", "a list of .* metadata .* the file ends"),
        ("tensors", "a list of .* tensors .* the file ends"),
        ("key name: length", "the key of metadata 1 of 7 must be 1 to 65,535 bytes long"),
        ("name: length", "'name' takes .* bytes .* the file ends"),
        ("flags: count", "'flags' takes .* bytes .* the file ends"),
        ("tags: count", "'tags', an array of .* strings .* the file ends"),
        ("tags[1]: length", "element 1 of metadata 'tags' takes .* the file ends"),
        ("nested: count", "'nested', an array of .* elements .* the file ends"),
        ("nested[0]: count", "element 0 of metadata 'nested' takes .* the file ends"),
        ("vocab: count", "'vocab', an array of .* strings .* the file ends"),
        ("vocab[17]: length", "string 17 of metadata 'vocab' ends at byte .* but the file at"),
        ("vocab[2999]: length", "string 2,999 of metadata 'vocab' ends at byte .* but the file at"),
        ("scores: count", "'scores' takes .* bytes .* the file ends"),
        ("tensor a.weight: length", "the name of tensor 1 of 1 must be 1 to 65,535 bytes long"),
        ("a.weight: axis 0", "'a.weight' .*(ends at byte|whole blocks)"),
        ("a.weight: axis 1", "'a.weight' .* ends at byte"),
        ("a.weight: offset", "'a.weight' .*(ends at byte|multiple)"),
    ],
)
def test_lengths_that_lie(tmp_path: Path, good: Built, field: str, match: str, value: int) -> None:
    refuse(write(tmp_path / "m.gguf", good.put(field, value)), match)


def test_truncated_anywhere(tmp_path: Path) -> None:
    file = build([*SCALARS, *PAIRS[:5]], ONE).data
    GGUF(write(tmp_path / "m.gguf", bytes(file)))
    for length in range(len(file)):
        path = write(tmp_path / "m.gguf", bytes(file[:length]))
        with pytest.raises(ModelFileError, match=r"the file ends|ends at byte|is empty|is not a GGUF"):
            GGUF(path)


@pytest.mark.parametrize("cut", range(12))
def test_a_long_array_of_strings_is_cut_near_a_string_s_end(tmp_path: Path, cut: int) -> None:
    file = build([("vocab", "array", ("str", VOCAB))], [])
    keep = file.fields["vocab[2998]: length"].at + cut
    refuse(write(tmp_path / "m.gguf", bytes(file.data[:keep])), "string 2,998 of metadata 'vocab' (takes|ends)")


@pytest.mark.parametrize("kind", [13, 99, 2**32 - 1])
@pytest.mark.parametrize("field", ["name: kind", "tags: element type", "nested[0]: element type"])
def test_unknown_metadata_types(tmp_path: Path, good: Built, field: str, kind: int) -> None:
    refuse(write(tmp_path / "m.gguf", good.put(field, kind)), f"unknown metadata type {kind}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("field", ["tags: element type", "vocab: element type"])
def test_wrong_element_types(tmp_path: Path, good: Built, field: str, kind: str) -> None:
    if kind != "str":
        refuse(write(tmp_path / "m.gguf", good.put(field, KINDS[kind])), None)


@pytest.mark.parametrize("field", ["flag", "flags[0]", "flags[1]"])
def test_bools_are_0_or_1(tmp_path: Path, good: Built, field: str) -> None:
    refuse(write(tmp_path / "m.gguf", good.put(field, 2)), f"'{field.split('[')[0]}' is a bool")


@pytest.mark.parametrize("bad", [b"\xff", b"a\xc3", b"\xe6\xa8", b"\xed\xa0\x80", b"\xc0\x80"])
@pytest.mark.parametrize("where", ["key", "value", "element", "name", "vocab"])
def test_bad_utf8(tmp_path: Path, bad: bytes, where: str) -> None:
    vocab = ["x" * 150] * 2000  # the byte behind a bad string is 150, which could continue a cut character
    vocab[1234:1235] = [bad]
    pairs: Metadata = {
        "key": [(bad, "u8", 1)],
        "value": [("k", "str", bad)],
        "element": [("k", "array", ("str", ["good", bad]))],
        "name": [],
        "vocab": [("k", "array", ("str", vocab)), ("last", "u8", 1)],
    }[where]
    tensors: Tensors = [(bad, (32,), "Q4_0", bytes(18))] if where == "name" else []
    match = {
        "key": "the key of metadata 1 of 1",
        "value": "metadata 'k'",
        "element": "element 1 of metadata 'k'",
        "name": "the name of tensor 1 of 1",
        "vocab": "string 1,234 of metadata 'k'",
    }[where]
    file = build(pairs, tensors)
    place = file.data.rindex(bad, 0, file.fields["k[1235]: length"].at if where == "vocab" else None)
    message = refuse(write(tmp_path / "m.gguf", file), f"{match} is not UTF-8 at byte ")
    assert int(message.split("byte ")[1].split()[0].replace(",", "")) in range(place, place + len(bad))


@pytest.mark.parametrize("size", [(1 << 20) - 4, (1 << 20) - 1, 1 << 20, (3 << 20) + 1])
def test_utf8_over_the_bounds_of_what_is_checked_at_once(tmp_path: Path, size: int) -> None:
    vocab: list[str | bytes] = ["é" * 100, "a" * size, "é" * 200, "b" * size, *VOCAB]
    source = GGUF(write(tmp_path / "m.gguf", build([("k", "array", ("str", vocab))], [])))
    assert list(source.metadata["k"]) == vocab
    vocab[3] = b"\xc3" + b"b" * size
    refuse(write(tmp_path / "m.gguf", build([("k", "array", ("str", vocab))], [])), "string 3 of .* UTF-8")
    vocab[3], vocab[-1] = "b" * size, b"\xc3"
    refuse(write(tmp_path / "m.gguf", build([("k", "array", ("str", vocab))], [])), "string 3,003 of .* UTF-8")


@pytest.mark.parametrize("before", range(9))
def test_a_length_over_the_bounds_of_what_is_checked_at_once(tmp_path: Path, before: int) -> None:
    """A length whose bytes are not ASCII begins so many bytes before the bound."""
    vocab = ["a" * ((1 << 20) - 8 - before), "b" * 0x818283, *VOCAB]
    source = GGUF(write(tmp_path / "m.gguf", build([("k", "array", ("str", vocab))], [])))
    assert source.metadata["k"][1] == vocab[1]


def test_duplicate_keys(tmp_path: Path) -> None:
    refuse(write(tmp_path / "m.gguf", build([("k", "u8", 1), ("k", "u8", 1)], [])), "key 'k' is there twice")


def test_an_empty_key(tmp_path: Path) -> None:
    refuse(write(tmp_path / "m.gguf", build([("", "str", "x")], [])), "must be 1 to 65,535 bytes long, not 0")


def test_arrays_nested_too_deep(tmp_path: Path) -> None:
    value: tuple[str, list[object]] = ("u8", [1])
    for _ in range(3):
        value = ("array", [value])
    GGUF(write(tmp_path / "m.gguf", build([("k", "array", value)], [])))
    refuse(write(tmp_path / "m.gguf", build([("k", "array", ("array", [value]))], [])), "more than 4 deep")
    file = build([], [])
    file.data[16:24] = (1).to_bytes(8, "little")
    file.text("key", "k")
    file.data += struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 200_000
    refuse(write(tmp_path / "m.gguf", file), "more than 4 deep")


@pytest.mark.parametrize("alignment", [0, 1, 4, 7, 24, 33, 2**32 - 1])
def test_alignment_must_be_a_power_of_two(tmp_path: Path, alignment: int) -> None:
    file = build([("general.alignment", "u32", 32)], ONE).put("general.alignment", alignment)
    refuse(write(tmp_path / "m.gguf", file), f"'general.alignment' must be .* not {alignment}")


@pytest.mark.parametrize("kind", ["u64", "i32", "f32", "str", "bool"])
def test_alignment_must_be_a_uint32(tmp_path: Path, kind: str) -> None:
    value = "32" if kind == "str" else 1
    refuse(write(tmp_path / "m.gguf", build([("general.alignment", kind, value)], ONE)), "must be a uint32")


def test_alignment_beyond_the_file(tmp_path: Path) -> None:
    file = build([("general.alignment", "u32", 32)], ONE).put("general.alignment", 2**31)
    refuse(write(tmp_path / "m.gguf", file), "'a.weight' .* ends at byte")


# ---- what it refuses: tensors


@pytest.mark.parametrize("axes", [0, 5, 9, 2**32 - 1])
def test_numbers_of_dimensions(tmp_path: Path, good: Built, axes: int) -> None:
    refuse(write(tmp_path / "m.gguf", good.put("a.weight: axes", axes)), f"'a.weight' has {axes:,} dimensions")


@pytest.mark.parametrize("axis", [0, 1])
def test_a_dimension_of_zero(tmp_path: Path, good: Built, axis: int) -> None:
    refuse(write(tmp_path / "m.gguf", good.put(f"a.weight: axis {axis}", 0)), "'a.weight' has a dimension of 0")


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (16, "IQ2_XXS"),
        (29, "IQ1_M"),
        (34, "TQ1_0"),
        (39, "MXFP4"),
        (15, "Q8_K"),
        (26, "I32"),
        (28, "F64"),
        (36, "IQ4_NL"),
    ],
)
def test_types_that_are_not_supported(tmp_path: Path, good: Built, number: int, name: str) -> None:
    path = write(tmp_path / "m.gguf", good.put("a.weight: type", number))
    refuse(path, rf"tensor 'a.weight' has the type {name}\w* \(number {number}\), which is not supported")


def test_type_numbers_agree_with_gguf() -> None:
    from headrace.loading.gguf_header import TENSOR_TYPES

    assert all(TENSOR_TYPES[kind.value] == kind.name for kind in gguf.GGMLQuantizationType)


@pytest.mark.parametrize("number", [42, 99, 2**32 - 1])
def test_types_that_nobody_knows(tmp_path: Path, good: Built, number: int) -> None:
    path = write(tmp_path / "m.gguf", good.put("a.weight: type", number))
    refuse(path, f"tensor 'a.weight' has the type number {number}, which is not supported")


def test_lines_that_are_not_whole_blocks(tmp_path: Path, good: Built) -> None:
    refuse(write(tmp_path / "m.gguf", good.put("a.weight: axis 0", 33)), "'a.weight' is Q4_0 with lines of 33 numbers")


def test_duplicate_tensors(tmp_path: Path) -> None:
    refuse(write(tmp_path / "m.gguf", build([], ONE + ONE)), "tensor 'a.weight' is there twice")


def test_an_offset_that_is_not_aligned(tmp_path: Path, good: Built) -> None:
    refuse(write(tmp_path / "m.gguf", good.put("a.weight: offset", 16)), "offset 16, which is not a multiple of 32")


def test_tensors_that_lie_on_each_other(tmp_path: Path) -> None:
    data = tensor_bytes((64,), "F32")
    file = build([], [("a", (64,), "F32", data), ("b", (64,), "F32", data)])
    GGUF(write(tmp_path / "m.gguf", file))
    refuse(write(tmp_path / "m.gguf", file.put("b: offset", 224)), "'a' and 'b' lie on each other")
    refuse(write(tmp_path / "m.gguf", file.put("b: offset", 0)), "lie on each other")


def test_bytes_that_belong_to_no_tensor(tmp_path: Path) -> None:
    """As a smaller type of the same blocks, or a smaller shape, leaves them: the numbers would be others."""
    four = TYPES["Q4_0"][0]
    shape, bytes_of = (8, 64), tensor_bytes((8, 64), "Q8_0")
    file = build([], [("a", shape, "Q8_0", bytes_of), ("b", shape, "Q8_0", bytes_of)])
    path = tmp_path / "m.gguf"
    refuse(write(path, file.put("a: type", four)), "tensor 'a' ends at byte .* but tensor 'b' begins at .* padding")
    refuse(write(path, file.put("b: type", four)), "tensor 'b' ends at byte .* but the file ends at .* padding")
    refuse(write(path, file.put("a: axis 1", 7)), "tensor 'a' ends at byte .* but tensor 'b' begins at")
    one = build([], [("a", shape, "Q8_0", bytes_of)])
    moved = bytes(one.put("a: offset", 32).data) + bytes(32)
    refuse(write(path, moved), "padding end at byte .* but tensor 'a' begins at")
    GGUF(write(path, one))
    padded = bytes(one.data) + bytes(-len(one.data) % 32)
    GGUF(write(path, padded))
    refuse(write(path, padded + b"x"), "tensor 'a' ends at byte .* but the file ends at")


@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_padding_is_no_gap(tmp_path: Path, alignment: int) -> None:
    pairs: Metadata = [("general.alignment", "u32", alignment)]
    odd = [(name, (3, 32), "Q4_0", tensor_bytes((3, 32), "Q4_0")) for name in "abc"]
    assert len(GGUF(write(tmp_path / "m.gguf", build(pairs, odd, alignment=alignment))).tensors) == 3


@pytest.mark.parametrize("missing", [1, 17, 36])
def test_the_last_tensor_is_cut(tmp_path: Path, good: Built, missing: int) -> None:
    path = write(tmp_path / "m.gguf", bytes(good.data[:-missing]))
    refuse(path, r"tensor 'a.weight' \(Q4_0 \[2, 32\]\) ends at byte .* cut short")


# ---- what it refuses: real files, spoiled (case W7)


@pytest.fixture(scope="module")
def copy(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("w7") / "smollm2.gguf"
    shutil.copyfile(smollm2, path)
    yield path
    path.unlink()


def number_behind(path: Path, name: bytes, skip: int) -> int:
    """The byte `skip` bytes behind a key or a tensor's name."""
    with path.open("rb") as file:
        header = file.read(4 << 20)
    return header.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + skip


TENSOR = b"blk.7.attn_q.weight"


@pytest.mark.parametrize(
    ("name", "skip", "value", "match"),
    [
        (TENSOR, 0, struct.pack("<I", 9), "has 9 dimensions"),
        (TENSOR, 4, struct.pack("<Q", 0), "has a dimension of 0"),
        (TENSOR, 12, struct.pack("<Q", 1 << 40), "ends at byte"),
        (TENSOR, 20, struct.pack("<I", 16), "IQ2_XXS"),
        (TENSOR, 20, struct.pack("<I", 2), "'blk.7.attn_q.weight' ends at byte .* but tensor 'blk.7"),
        (TENSOR, 24, struct.pack("<Q", 1 << 63), "ends at byte"),
        (b"tokenizer.ggml.tokens", 4, struct.pack("<I", 4), None),
        (b"tokenizer.ggml.tokens", 8, struct.pack("<Q", 1 << 40), "'tokenizer.ggml.tokens', an array of 1,099,511"),
        (b"tokenizer.ggml.tokens", -1, b"w", None),
        (b"llama.rope.freq_base", -20, b"llama.block_count\0\0\0", None),
    ],
)
def test_a_real_file_with_a_lie(copy: Path, name: bytes, skip: int, value: bytes, match: str | None) -> None:
    at = number_behind(copy, name, skip)
    with copy.open("r+b") as file:
        file.seek(at)
        before = file.read(len(value))
        file.seek(at)
        file.write(value)
        file.flush()
        try:
            if skip < 0:  # another key: legal as such
                assert name.decode() not in GGUF(copy).metadata
            else:
                refuse(copy, match)
        finally:
            file.seek(at)
            file.write(before)
    GGUF(copy)


def test_a_real_file_cut_short(copy: Path) -> None:
    """Last, and the mildest cut first: it eats the copy up."""
    size = copy.stat().st_size
    for keep in (size - 1, size - (1 << 20), size // 2, 1 << 20, 4000, 23):
        os.truncate(copy, keep)
        refuse(copy, "cut short")


# ---- bounds: the worst that fits into tens of megabytes


def header(pairs: int, tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs)


def key(name: bytes, kind: int) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind)


def strings(count: int, body: bytes) -> bytes:
    return key(b"k", 9) + struct.pack("<IQ", 8, count) + body


def numbered(template: bytes, count: int) -> bytes:
    """`template` `count` times, with %08d counted up."""
    return b"".join(template % i for i in range(count))


U64 = struct.Struct("<Q").pack
EMPTY_ARRAY = struct.pack("<IQ", 4, 0)
NUMBERS = struct.pack("<IQ", 3, 1000) + struct.pack("<h", 999) * 1000
SHORT_STRINGS = struct.pack("<IQ", 8, 1024) + (U64(3) + b"abc") * 1024
TENSOR_INFO = U64(8) + b"%08d" + struct.pack("<IQQQQIQ", 4, 30, 30, 30, 30, 0, 0)


def arrays(count: int, body: bytes) -> bytes:
    return key(b"k", 9) + struct.pack("<IQ", 9, count) + body


WORST: dict[str, tuple[str, Callable[[], bytes]]] = {
    "millions of empty strings": (
        "header is too large",
        lambda: header(2) + strings(5_000_000, bytes(40_000_000)),
    ),
    "a million empty strings, then nothing": (
        "key of metadata 2 of 2",
        lambda: header(2) + strings(1_400_000, bytes(11_200_013)),
    ),
    "a million short strings, the last one bad": (
        "string 1,399,999 .* UTF-8",
        lambda: header(1) + strings(1_400_000, (U64(2) + b"ab") * 1_399_999 + U64(2) + b"a\xff"),
    ),
    "a string too long": (
        "header is too large",
        lambda: header(1) + key(b"k", 8) + U64(50_000_000) + b"x" * 50_000_000,
    ),
    "a long string, bad at its end": (
        "not UTF-8",
        lambda: header(1) + key(b"k", 8) + U64(15_000_000) + b"x" * 14_999_999 + b"\xff",
    ),
    "a long string of emoji, then nothing": (
        "key of metadata 2 of 2",
        lambda: header(2) + key(b"k", 8) + U64(16_000_000) + "😀".encode() * 4_000_000 + bytes(13),
    ),
    "a long string in a long array, bad at its end": (
        "string 0 .* UTF-8",
        lambda: header(1) + strings(2000, U64(50_000_000) + b"x" * 49_999_999 + b"\xff" + bytes(8 * 1999)),
    ),
    "empty arrays in an array": (
        "header is too large",
        lambda: header(2) + arrays(3_000_000, EMPTY_ARRAY * 3_000_000),
    ),
    "empty arrays in an array, then nothing": (
        "key of metadata 2 of 2",
        lambda: header(2) + arrays(70_000, EMPTY_ARRAY * 70_000 + bytes(13)),
    ),
    "arrays of numbers in an array": (
        "header is too large",
        lambda: header(2) + arrays(20_000, NUMBERS * 20_000),
    ),
    "arrays of strings in an array": (
        "header is too large",
        lambda: header(2) + arrays(2000, SHORT_STRINGS * 2000),
    ),
    "keys": (
        "header is too large",
        lambda: header(1_000_000) + numbered(U64(8) + b"%08d" + struct.pack("<IB", 0, 1), 1_000_000),
    ),
    "tensors": (
        "header is too large",
        lambda: header(0, 500_000) + numbered(TENSOR_INFO, 500_000),
    ),
    "tensors on each other": (
        "lie on each other",
        lambda: header(0, 40_000) + numbered(TENSOR_INFO, 40_000) + bytes(1 << 22),
    ),
    "bools, the last one 2": (
        "is a bool",
        lambda: header(1) + key(b"k", 9) + struct.pack("<IQ", 7, 50_000_000) + bytes(49_999_999) + b"\2",
    ),
}
"""Files that cost as much as they can, and what is said of them."""


@pytest.mark.parametrize("name", WORST)
def test_the_worst_is_refused_in_bounds(tmp_path: Path, name: str) -> None:
    match, make = WORST[name]
    refuse(write(tmp_path / "m.gguf", make()), match)


def test_a_huge_sparse_file(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", header(2) + key(b"k", 9) + struct.pack("<IQ", 8, 1 << 36))
    os.truncate(path, 1 << 40)
    with pytest.raises(ModelFileError, match="header is too large"):
        GGUF(path)


# ---- split files


def split(folder: Path, count: int = 3, *, stem: str = "m", **changes: int) -> list[Path]:
    """A model of `count` parts; the first has metadata, and part i the tensors i.a and i.b."""
    paths = []
    for part in range(count):
        own = {"split.no": part, "split.count": count, "split.tensors.count": 2 * count} | changes
        metadata: Metadata = [("general.name", "str", "whole")] if not part else []
        metadata += [(name, "u16", value) for name, value in own.items()]
        tensors: Tensors = [(f"{part}.{x}", (8,), "F32", tensor_bytes((8,), "F32", part)) for x in "ab"]
        path = folder / f"{stem}-{part + 1:05d}-of-{count:05d}.gguf"
        paths.append(write(path, build(metadata, tensors)))
    return paths


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_part_opens_the_whole(tmp_path: Path, given: int) -> None:
    source = GGUF(split(tmp_path)[given])
    assert list(source.tensors) == ["0.a", "0.b", "1.a", "1.b", "2.a", "2.b"]
    assert source.metadata["general.name"] == "whole"
    for part in range(3):
        assert source.read(f"{part}.b").data.tobytes() == tensor_bytes((8,), "F32", part)


def test_a_first_part_with_metadata_only(tmp_path: Path) -> None:
    paths = split(tmp_path, 2, **{"split.tensors.count": 2})
    pairs: Metadata = [("split.no", "u16", 0), ("split.count", "u16", 2), ("split.tensors.count", "i32", 2)]
    write(paths[0], build(pairs, []))
    assert list(GGUF(paths[1]).tensors) == ["1.a", "1.b"]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_part_is_named(tmp_path: Path, missing: int) -> None:
    paths = split(tmp_path)
    paths[missing].unlink()
    refuse(paths[missing - 1], f"part {missing + 1} of 3 is missing: {paths[missing].name}")
    with pytest.raises(ModelFileError, match="does not exist"):
        GGUF(paths[missing])


def test_parts_next_to_a_symlink(tmp_path: Path) -> None:
    """The hub's cache: names are links, the files are called by their hash."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "names").mkdir()
    for i, path in enumerate(split(tmp_path)):
        (tmp_path / "names" / path.name).symlink_to(path.rename(tmp_path / "blobs" / f"hash{i}"))
    assert len(GGUF(tmp_path / "names" / "m-00002-of-00003.gguf").tensors) == 6


def test_parts_with_a_suffix_in_capitals(tmp_path: Path) -> None:
    """Readers and the choice of files agree on what a part is called."""
    paths = [path.rename(path.with_suffix(".GGUF")) for path in split(tmp_path)]
    assert len(GGUF(paths[1]).tensors) == 6


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    paths = split(tmp_path)
    os.truncate(paths[1], paths[1].stat().st_size - 1)
    with pytest.raises(ModelFileError, match=r"m-00002-of-00003.gguf: tensor '1.b' .* cut short"):
        GGUF(paths[0])


def test_a_part_in_the_wrong_place(tmp_path: Path) -> None:
    paths = split(tmp_path)
    shutil.copyfile(paths[0], paths[2])
    with pytest.raises(ModelFileError, match=r"00003-of-00003.gguf: its name says part 3 of 3, but split.no is 0"):
        GGUF(paths[0])


@pytest.mark.parametrize("changes", [{"split.count": 4}, {"split.count": 0}])
def test_parts_that_disagree_with_their_names(tmp_path: Path, changes: dict[str, int]) -> None:
    refuse(split(tmp_path, **changes)[0], "its name says part 1 of 3, but")


def test_parts_cut_by_other_tools(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"m-0000{i}-of-00002.gguf", build([], ONE)) for i in (1, 2)]
    refuse(paths[0], "its name says part 1 of 2, but split.no is 0, split.count 0")


def test_a_renamed_part(tmp_path: Path) -> None:
    refuse(split(tmp_path)[1].rename(tmp_path / "m.gguf"), "is one part of a model")


def test_a_tensor_in_two_parts(tmp_path: Path) -> None:
    paths = split(tmp_path, 2)
    pairs: Metadata = [("split.no", "u16", 1), ("split.count", "u16", 2)]
    write(paths[1], build(pairs, [("0.a", (8,), "F32", bytes(32))]))
    with pytest.raises(ModelFileError, match=r"00002-of-00002.gguf: tensor '0.a' is in an earlier part too"):
        GGUF(paths[0])


def test_too_few_tensors(tmp_path: Path) -> None:
    refuse(split(tmp_path, **{"split.tensors.count": 7})[0], "split.tensors.count is 7, but all parts hold 6")


@pytest.mark.parametrize("kind", ["str", "f32", "array"])
def test_split_metadata_of_a_wrong_type(tmp_path: Path, kind: str) -> None:
    value = {"str": "1", "f32": 1.0, "array": ("u16", [1] * 2000)}[kind]
    for name in ("split.count", "split.no", "split.tensors.count"):
        refuse(write(tmp_path / "m.gguf", build([(name, kind, value)], [])), f"'{name}' must be a whole number")


@pytest.mark.parametrize("name", ["m-00000-of-00003.gguf", "m-00004-of-00003.gguf", "m-00001-of-00000.gguf"])
def test_part_numbers_that_cannot_be(tmp_path: Path, name: str) -> None:
    refuse(write(tmp_path / name, build([], ONE)), "is called part")


def test_a_model_of_one_part(tmp_path: Path) -> None:
    pairs: Metadata = [("split.no", "u16", 0), ("split.count", "u16", 1), ("split.tensors.count", "i32", 1)]
    assert len(GGUF(write(tmp_path / "m-00001-of-00001.gguf", build(pairs, ONE))).tensors) == 1


# ---- together


def test_many_threads_open_one_file(tmp_path: Path, good: Built) -> None:
    path = write(tmp_path / "m.gguf", good)
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(GGUF(path).read("a.weight").data.tobytes())) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [ONE[0][3]] * 8
