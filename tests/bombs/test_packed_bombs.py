"""Tests of small metadata files, manifests and request bodies that expand to many bytes."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path

import fastavro
import numpy as np
import pyarrow as pa
import pytest

from seamark.formats.iceberg.manifests.manifest import decode_manifest
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.formats.index.keys import arrow_keys
from seamark.formats.index.keys.arrow_keys import convert_to_keys
from seamark.formats.runtime.errors import Corrupt
from tests.bombs.peak import measure_peak

MIB = 1 << 20
ROWS = 20_000


def decode_as_metadata(path: str) -> str:
    try:
        decode_table(Path(path).read_bytes(), "file:///t/v1.gz.metadata.json")
    except Corrupt as error:
        return error.message
    return "decoded"


def test_metadata_file_that_expands_beyond_the_limit_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "v1.gz.metadata.json"
    path.write_bytes(gzip.compress(b'{"properties":{"a":"' + bytes(200 * MIB) + b'"}}'))
    assert path.stat().st_size < MIB
    size, report = measure_peak(decode_as_metadata, path)
    assert "the gzip stream is truncated, or contains more than" in report
    assert size < 64 * MIB


def decode_as_manifest(path: str) -> str:
    try:
        decode_manifest(Path(path).read_bytes(), "file:///t/m.avro")
    except Corrupt as error:
        return error.message
    return "decoded"


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("codec", ["deflate", "zstandard"])
def test_manifest_that_inflates_beyond_the_limit_is_corrupt(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "m.avro"
    buffer = io.BytesIO()
    schema = {"type": "record", "name": "manifest_entry", "fields": [{"name": "status", "type": "int"}]}
    fastavro.writer(buffer, schema, [{"status": 1}], codec="null")
    # The header of an Avro file ends with the marker of 16 random bytes that also ends each block.
    file = buffer.getvalue()
    sync_marker = file[-16:]
    header = file[: file.index(sync_marker) + 16]
    rows = bytes(300 * MIB)  # This is more than the limit, and zeros take less than a MiB when they are compressed.
    if codec == "deflate":
        packer = zlib.compressobj(9, wbits=-15)
        block = packer.compress(rows) + packer.flush()
    else:
        block = pa.Codec("zstd", 3).compress(rows, asbytes=True)
    header = header.replace(b"avro.codec\x08null", b"avro.codec" + _encode_long(len(codec)) + codec.encode())
    path.write_bytes(header + _encode_long(1) + _encode_long(len(block)) + block + sync_marker)
    assert path.stat().st_size < MIB
    size, report = measure_peak(decode_as_manifest, path)
    assert "inflates to more than" in report
    assert size < 256 * MIB


def _encode_long(value: int) -> bytes:
    """Encode a number of at least 0 as Avro does: zigzag, and 7 bits in each byte."""
    zigzag = value << 1
    encoded = bytearray()
    while zigzag >= 0x80:
        encoded.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    return bytes([*encoded, zigzag])


def make_shared_values(form: str) -> pa.Array:
    """Return an array of 20,000 rows that all refer to one value of 100 KB.

    The form is "dictionary" or "runs". For any other text, the array has string views.
    """
    value = pa.array(["x" * 100_000])
    if form == "dictionary":
        return pa.DictionaryArray.from_arrays(pa.array([0] * ROWS, pa.int32()), value)
    if form == "runs":
        return pa.RunEndEncodedArray.from_arrays(pa.array([ROWS], pa.int32()), value)
    view = pa.array(["x" * 100_000], pa.string_view())
    views = np.tile(np.frombuffer(view.buffers()[1], np.uint8)[:16], ROWS)  # A view has 16 bytes.
    return pa.Array.from_buffers(pa.string_view(), ROWS, [None, pa.py_buffer(views.tobytes()), *view.buffers()[2:]])


def expand_to_keys(form: str) -> str:
    try:
        convert_to_keys(make_shared_values(form), "string")
    except ValueError as error:
        return str(error)
    return "expanded"


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("form", ["dictionary", "runs", "views"])
def test_keys_whose_rows_share_one_long_value_are_not_expanded(form: str) -> None:
    size, report = measure_peak(expand_to_keys, form)
    assert report == f"the values would take more than {arrow_keys.EXPANDED_MAX:,} bytes if each row had its own copy"
    assert size < 64 * MIB


def test_shared_values_within_the_limit_are_expanded_to_keys() -> None:
    plain_array = pa.array(["a", "b", None, "a"])
    forms = [plain_array.dictionary_encode(), plain_array.cast(pa.string_view()), pa.array(plain_array).slice(0)]
    expected = convert_to_keys(plain_array, "string")
    for form in forms:
        keys = convert_to_keys(form, "string")
        assert keys.heap is not None
        assert expected.heap is not None
        assert keys.heap.tobytes() == expected.heap.tobytes()
        assert keys.rows == 4
