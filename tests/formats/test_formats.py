"""Every format against the gguf package's reference, bit for bit, and what every format has in common."""

from __future__ import annotations

import tracemalloc
import warnings

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from headrace.formats import FORMATS, Format
from headrace.formats.format import SLICE

ALL = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS.keys())
BLOCKED = [form for form in FORMATS.values() if form.block > 1]


def random_bytes(*shape: int, seed: int = 0) -> np.ndarray:
    data = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    data.flags.writeable = False
    return data


def tensor(form: type[Format], *shape: int, seed: int = 0) -> Format:
    return form(shape, random_bytes(*shape[:-1], form.line_bytes(shape[-1]), seed=seed))


def reference(stored: Format) -> np.ndarray:
    with np.errstate(all="ignore"):
        return dequantize(stored.data, GGMLQuantizationType[stored.name]).reshape(stored.shape)


def assert_same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    """The same float32, -0 and infinities included; a NaN is a NaN."""
    assert got.dtype == expected.dtype == np.float32
    same = (got.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(got) & np.isnan(expected))
    assert same.all(), f"{np.count_nonzero(~same)} of {same.size} differ, first at {np.argwhere(~same)[0]}"


def test_the_registry_has_what_files_use() -> None:
    expected = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS"
    assert list(FORMATS) == expected.split()
    assert all(form.name == name for name, form in FORMATS.items())


@ALL
def test_block_sizes(form: type[Format]) -> None:
    assert (form.block, form.block_bytes) == GGML_QUANT_SIZES[GGMLQuantizationType[form.name]]


@ALL
def test_decode_equals_gguf_on_random_blocks(form: type[Format]) -> None:
    blocks = random_bytes(2 * SLICE // form.block + 3, form.block_bytes)  # more than two slices
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = form.decode(blocks)
    assert got.shape == (len(blocks), form.block)
    with np.errstate(all="ignore"):
        expected = dequantize(blocks, GGMLQuantizationType[form.name]).reshape(got.shape)
    assert_same_bits(got, expected)


@ALL
def test_decode_of_every_byte_alone(form: type[Format]) -> None:
    """Each byte of a block takes all its values while the others are zero or ones: no bit is ignored or misplaced."""
    values = np.arange(256, dtype=np.uint8)
    for others in (0, 0x3C):  # 0x3C3C is a binary16 of about 1
        blocks = np.full((form.block_bytes, 256, form.block_bytes), others, np.uint8)
        for place in range(form.block_bytes):
            blocks[place, :, place] = values
        stored = form((form.block_bytes * 256, form.block), blocks.reshape(-1, form.block_bytes))
        assert_same_bits(stored.dense(), reference(stored))


@ALL
def test_decode_of_nothing(form: type[Format]) -> None:
    assert form.decode(np.empty((0, form.block_bytes), np.uint8)).shape == (0, form.block)


@ALL
@pytest.mark.parametrize("axes", [1, 2, 3, 4])
def test_dense(form: type[Format], axes: int) -> None:
    stored = tensor(form, *(3, 2, 5, 2 * form.block)[-axes:])
    got = stored.dense()
    assert got.shape == stored.shape
    assert got.flags.writeable
    assert not np.shares_memory(got, stored.data)
    assert_same_bits(got, reference(stored))


@ALL
def test_dense_of_unaligned_data(form: type[Format]) -> None:
    """Tensors of a mapped safetensors file begin at any byte."""
    line = form.line_bytes(2 * form.block)
    raw = random_bytes(3 * line + 1)
    stored = form((3, 2 * form.block), raw[1:].reshape(3, line))
    assert_same_bits(stored.dense(), reference(form(stored.shape, stored.data.copy())))


@ALL
def test_temporaries_are_bounded(form: type[Format]) -> None:
    stored = tensor(form, 64, 1 << 16)
    tracemalloc.start()
    try:
        got = stored.dense()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < got.nbytes + (8 << 20)


@ALL
@pytest.mark.parametrize(
    "rows",
    [slice(0, 7), slice(2, 5), slice(1, 7, 2), slice(3, 3), np.array([6, 0, 0, 3]), np.array([], np.int64)],
    ids=str,
)
def test_shard(form: type[Format], rows: slice | np.ndarray) -> None:
    stored = tensor(form, 7, 3, form.block)
    part = stored.shard(rows)
    assert type(part) is form
    assert_same_bits(part.dense(), stored.dense()[rows])
    assert np.shares_memory(part.data, stored.data) == (isinstance(rows, slice) and part.data.size > 0)
    assert part.nbytes == part.data.size == part.shape[0] * 3 * form.block_bytes


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_shard_of_a_vector(name: str) -> None:
    stored = tensor(FORMATS[name], 9)
    for rows in (slice(2, 5), np.array([8, 0, 8])):
        part = stored.shard(rows)
        assert part.shape == (3,)
        assert_same_bits(part.dense(), stored.dense()[rows])
    assert np.shares_memory(stored.shard(slice(2, 5)).data, stored.data)


@pytest.mark.parametrize("form", BLOCKED, ids=lambda form: form.name)
def test_shard_of_a_vector_of_blocks_is_refused(form: type[Format]) -> None:
    with pytest.raises(ValueError, match="no lines"):
        tensor(form, 2 * form.block).shard(slice(0, 1))


def test_a_scalar() -> None:
    stored = FORMATS["F32"]((), np.frombuffer(np.float32(2.5).tobytes(), np.uint8))
    assert stored.dense().shape == ()
    assert stored.dense() == 2.5
    with pytest.raises(ValueError, match="no lines"):
        stored.shard(slice(0, 1))


@ALL
def test_data_must_fit_the_shape(form: type[Format]) -> None:
    good = tensor(form, 2, 2 * form.block)
    for shape in [(3, 2 * form.block), (2, 3 * form.block), (2 * form.block,), (1, 2, 2 * form.block)]:
        with pytest.raises(ValueError, match=form.name):
            form(shape, good.data)
    with pytest.raises(ValueError, match="uint8"):
        form(good.shape, good.data.astype(np.int8))


@pytest.mark.parametrize("form", BLOCKED, ids=lambda form: form.name)
def test_lines_are_whole_blocks(form: type[Format]) -> None:
    assert form.line_bytes(3 * form.block) == 3 * form.block_bytes
    with pytest.raises(ValueError, match=f"whole blocks of {form.block}"):
        form.line_bytes(form.block + form.block // 2)
