"""Tests of written delete files: PyIceberg, the server and Seamark's reader read the expected deletes."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyroaring
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.table.deletion_vector import deletion_vectors_from_puffin_file
from pyiceberg.table.puffin import PuffinFile

from seamark.connector.arrow.casting import Unwritable
from seamark.connector.client.storage import Storage
from seamark.connector.read.deleted_rows import Deletes
from seamark.connector.write.delete_files import (
    DeletedRows,
    WrittenDeletes,
    encode_vector,
    write_deletes,
    write_equality_deletes,
)
from seamark.connector.write.table_writer import write_batches
from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.iceberg.manifests.content_file import decode_content_file
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.partition import UNPARTITIONED
from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.formats.index.keys.delete_files import DeleteFile, Positions, decode_delete_content
from tests.connector.write.written import build_metadata, build_spec, build_target, index_by_column

SCHEMA = Schema((Field(1, "id", True, "long"), Field(2, "land", False, "string"), Field(3, "ratio", False, "double")))


def build_positions(*positions: int) -> Any:
    return np.array(positions, dtype=np.int64)


def list_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def to_path(file: dict[str, Any]) -> Path:
    return Path(file["file-path"].removeprefix("file://"))


def read_deleted_positions(file: dict[str, Any], path: str) -> list[int]:
    """Return the deleted positions of the data file `path` that the server reads from a delete file."""
    data = to_path(file).read_bytes()
    offset, length = file.get("content-offset", 0), file.get("content-size-in-bytes", len(data))
    delete_file_fields = (
        file["file-format"].lower(),
        1,  # The content code of position deletes.
        len(data),
        file["record-count"],
        file.get("referenced-data-file"),
    )
    delete_content = decode_delete_content(
        data[offset : offset + length],
        DeleteFile(file["file-path"], *delete_file_fields, offset, length, ()),
        (),
        limit_bytes=1 << 20,
    )
    assert isinstance(delete_content, Positions)
    return delete_content.get_positions(path).tolist()


FILE_PATH_FIELD_ID, POSITION_FIELD_ID = 2147483546, 2147483545
"""The specification reserves these field ids for the two columns of a position delete file."""
POSITIONS = st.lists(
    st.integers(0, 300) | st.integers(0, 2**20) | st.integers(2**32 - 3, 2**32 + 3) | st.integers(0, 2**62), min_size=1
)


@given(POSITIONS)
def test_encoded_vector_matches_the_specification(positions: list[int]) -> None:
    distinct_positions = sorted(set(positions))
    blob = encode_vector(build_positions(*distinct_positions))
    # The parts are: the length of magic number and bitmap, the magic number, the bitmap, and a checksum.
    assert struct.unpack(">I", blob[:4])[0] == len(blob) - 8  # The length excludes itself and the checksum.
    assert blob[4:8].hex() == "d1d33964"
    assert struct.unpack(">I", blob[-4:])[0] == zlib.crc32(blob[4:-4])
    bitmap = pyroaring.BitMap64.deserialize(blob[8:-4])
    assert list(bitmap) == distinct_positions
    bitmap.run_optimize()
    assert blob[8:-4] == bitmap.serialize(), "the keys must ascend, and the bitmaps must have the portable format"


def test_pyiceberg_reads_the_vectors_of_a_puffin_file(tmp_path: Path) -> None:
    metadata = build_metadata(tmp_path, SCHEMA)
    positions_by_file = {
        "file:///a.parquet": [3, 1, 4, 1, 5],
        "file:///ü.parquet": list(range(100, 9000)),
        "file:///none": [],
    }
    rows = [DeletedRows(path, 0, [], build_positions(*positions)) for path, positions in positions_by_file.items()]
    written_files = write_deletes(build_target(metadata), rows, Deletes(Storage(), metadata))
    assert written_files.removed == ()
    (puffin,) = list_files(tmp_path)
    vectors_by_path = {
        deletion_vector.referenced_data_file: deletion_vector.to_vector()
        for deletion_vector in deletion_vectors_from_puffin_file(PuffinFile(puffin.read_bytes()))
    }
    expected = {path: sorted(set(positions)) for path, positions in positions_by_file.items() if positions}
    assert {path: vector.to_pylist() for path, vector in vectors_by_path.items()} == expected
    for file in written_files.files:
        content_file = decode_content_file(file, metadata)
        assert content_file.file_size_in_bytes == puffin.stat().st_size
        assert content_file.referenced_data_file is not None
        assert (
            read_deleted_positions(file, content_file.referenced_data_file)
            == expected[content_file.referenced_data_file]
        )
        assert content_file.record_count == len(expected[content_file.referenced_data_file])


def test_new_vector_includes_earlier_deletes_and_names_what_it_replaces(tmp_path: Path) -> None:
    old_metadata, metadata = build_metadata(tmp_path, SCHEMA, version=2), build_metadata(tmp_path, SCHEMA)
    reader = Deletes(Storage(), metadata)
    a, b, c = "file:///a.parquet", "file:///b.parquet", "file:///c.parquet"
    deletes_of_a_and_b = write_deletes(
        build_target(old_metadata), [DeletedRows(path, 0, [], build_positions(7)) for path in (a, b)], reader
    ).files
    deletes_of_b = write_deletes(build_target(old_metadata), [DeletedRows(b, 0, [], build_positions(8))], reader).files
    vector_of_c = write_deletes(build_target(metadata), [DeletedRows(c, 0, [], build_positions(1, 2))], reader).files
    equality_deletes = write_equality_deletes(build_target(metadata), pa.table({"id": [9]}), ["id"]).files
    rows = [
        DeletedRows(a, 0, [], build_positions(0), [*deletes_of_a_and_b, *equality_deletes]),
        DeletedRows(b, 0, [], build_positions(0), [*deletes_of_a_and_b, *deletes_of_b]),
        DeletedRows(c, 0, [], build_positions(2, 3), vector_of_c),
    ]
    written_files = write_deletes(build_target(metadata), rows, reader)
    actual = {
        file["referenced-data-file"]: read_deleted_positions(file, file["referenced-data-file"])
        for file in written_files.files
    }
    assert actual == {a: [0, 7], b: [0, 7, 8], c: [1, 2, 3]}
    assert list(written_files.removed) == [
        {"file-path": deletes_of_b[0]["file-path"]},
        {"file-path": vector_of_c[0]["file-path"], "content-offset": vector_of_c[0]["content-offset"]},
    ]


def test_new_vector_includes_a_delete_file_with_repeated_positions(tmp_path: Path) -> None:
    """Merged delete files can repeat positions, and Java's readers accept them."""
    metadata, path = build_metadata(tmp_path, SCHEMA), "file:///a.parquet"
    reader = Deletes(Storage(), metadata)
    (file,) = write_deletes(
        build_target(build_metadata(tmp_path, SCHEMA, version=2)),
        [DeletedRows(path, 0, [], build_positions(1, 3))],
        reader,
    ).files
    rows = pq.read_table(to_path(file))
    pq.write_table(pa.concat_tables([rows.slice(0, 1), rows]), to_path(file))  # The positions are now 1, 1, 3.
    assert reader.load(path, [file]).positions.tolist() == [1, 3]
    written_files = write_deletes(
        build_target(metadata), [DeletedRows(path, 0, [], build_positions(2), [file])], reader
    )
    (vector,) = written_files.files
    assert read_deleted_positions(vector, path) == [1, 2, 3]


def test_deletes_without_new_positions_write_no_file(tmp_path: Path) -> None:
    metadata = build_metadata(tmp_path, SCHEMA)
    reader = Deletes(Storage(), metadata)
    first_deletes = write_deletes(
        build_target(metadata), [DeletedRows("file:///a", 0, [], build_positions(1, 2))], reader
    )
    second_deletes = [
        DeletedRows("file:///a", 0, [], build_positions(2), first_deletes.files),
        DeletedRows("file:///b", 0, [], build_positions()),
    ]
    assert write_deletes(build_target(metadata), second_deletes, reader) == WrittenDeletes()
    assert (
        write_deletes(build_target(build_metadata(tmp_path, SCHEMA, version=2)), second_deletes[1:], reader)
        == WrittenDeletes()
    )
    assert len(list_files(tmp_path)) == 1


def test_change_with_an_unreadable_delete_file_is_refused_and_restores_no_row(tmp_path: Path) -> None:
    metadata = build_metadata(tmp_path, SCHEMA)
    first_deletes = write_deletes(
        build_target(metadata), [DeletedRows("file:///a", 0, [], build_positions(1, 2))], Deletes(Storage(), metadata)
    )
    data = bytearray(to_path(first_deletes.files[0]).read_bytes())
    data[first_deletes.files[0]["content-offset"] + 20] ^= 1  # A bit of the bitmap.
    to_path(first_deletes.files[0]).write_bytes(data)
    row = DeletedRows("file:///a", 0, [], build_positions(5), first_deletes.files)
    with pytest.raises(Unreadable, match="checksum"):
        write_deletes(build_target(metadata), [row], Deletes(Storage(), metadata))
    first_deletes.discard(Storage())
    with pytest.raises(Unreadable, match="puffin"):
        write_deletes(build_target(metadata), [row], Deletes(Storage(), metadata))
    assert list_files(tmp_path) == []


@pytest.mark.parametrize("by_file", [False, True])
def test_position_deletes_are_sorted_and_have_bounds(tmp_path: Path, by_file: bool) -> None:
    properties = {
        "write.delete.granularity": "file" if by_file else "partition",
        "write.delete.parquet.compression-codec": "gzip",
    }
    metadata = build_metadata(tmp_path, SCHEMA, spec=build_spec(("identity", 2)), properties=properties, version=2)
    long_path = "file:///" + "x" * 5000
    partitions = [("file:///b", ["de"]), ("file:///a", ["de"]), ("file:///c", [None]), (long_path, ["fr"])]
    rows = [DeletedRows(path, 0, partition, build_positions(5, 1, 5, 2**40)) for path, partition in partitions]
    written_deletes = write_deletes(build_target(metadata), rows, Deletes(Storage(), metadata))
    assert len(written_deletes.files) == (4 if by_file else 3)
    written_partitions = []
    for file in written_deletes.files:
        decode_content_file(file, metadata)
        with pq.ParquetFile(to_path(file)) as parquet_file:
            assert [parquet_file.schema_arrow.field(n).name for n in (0, 1)] == ["file_path", "pos"]
            assert [int(parquet_file.schema_arrow.field(n).metadata[b"PARQUET:field_id"]) for n in (0, 1)] == [
                FILE_PATH_FIELD_ID,
                POSITION_FIELD_ID,
            ]
            assert parquet_file.metadata.row_group(0).column(0).compression == "GZIP"
            assert parquet_file.metadata.metadata[b"delete-type"] == b"position"
            rows_of_file = parquet_file.read().to_pydict()
        paths = sorted(set(rows_of_file["file_path"]))
        pairs = list(zip(rows_of_file["file_path"], rows_of_file["pos"], strict=True))
        assert pairs == [(path, position) for path in paths for position in (1, 5, 2**40)]
        lower, upper = index_by_column(file["lower-bounds"]), index_by_column(file["upper-bounds"])
        assert (lower[FILE_PATH_FIELD_ID].decode(), upper[FILE_PATH_FIELD_ID].decode()) == (paths[0], paths[-1])
        assert struct.unpack("<qq", lower[POSITION_FIELD_ID] + upper[POSITION_FIELD_ID]) == (1, 2**40)
        assert file.get("referenced-data-file") == (paths[0] if len(paths) == 1 else None)
        assert file.get("sort-order-id") is None
        written_partitions.extend((path, file["partition"]) for path in paths)
    assert sorted(written_partitions, key=str) == sorted(partitions, key=str)


def test_equality_deletes_are_written_to_the_partitions_of_their_keys(tmp_path: Path) -> None:
    metadata = build_metadata(tmp_path, SCHEMA, spec=build_spec(("identity", 2), ("bucket[2]", 1)))
    write_target = build_target(metadata)
    keys = pa.table({"land": ["de", "fr", None, "de"], "id": [1, 1, None, 7], "ratio": [0.0] * 4})
    written_files = write_equality_deletes(write_target, keys, ["id", "land"])
    written_rows = []
    for file in written_files.files:
        assert decode_content_file(file, metadata).equality_ids == (1, 2)
        with pq.ParquetFile(to_path(file)) as parquet_file:
            rows = parquet_file.read().to_pylist()
        assert {row["land"] for row in rows} == {file["partition"][0]}
        written_rows.extend(rows)
    assert sorted(written_rows, key=str) == sorted(keys.select(["id", "land"]).to_pylist(), key=str)
    global_deletes = write_equality_deletes(write_target, keys, ["id"], spec=UNPARTITIONED)
    assert [file["partition"] for file in global_deletes.files] == [[]]
    assert global_deletes.files[0]["record-count"] == 4


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["id"], r"partitioned by land, not in the key id"),
        (["land", "ratio"], "ratio"),
        (["land", "nothing"], "no column nothing"),
        ([], "at least one"),
        (["land", "land"], "name each column once"),
    ],
)
def test_columns_that_cannot_be_a_key_are_refused(tmp_path: Path, columns: list[str], message: str) -> None:
    metadata = build_metadata(tmp_path, SCHEMA, spec=build_spec(("identity", 2)))
    keys = pa.table({"id": [1], "land": ["de"], "ratio": [0.5]})
    with pytest.raises(Unwritable, match=message):
        write_equality_deletes(build_target(metadata), keys, columns)
    assert list_files(tmp_path) == []


def test_each_format_version_has_its_own_kind_of_deletes(tmp_path: Path) -> None:
    def build_table_and_deletes(version: int) -> tuple[TableMetadata, Deletes]:
        metadata = build_metadata(tmp_path, SCHEMA, version=version)
        return metadata, Deletes(Storage(), metadata)

    deletes = [DeletedRows("file:///a", 0, [], build_positions(1))]
    for version, file_format in ((2, "PARQUET"), (3, "PUFFIN")):
        metadata, reader = build_table_and_deletes(version)
        assert write_deletes(build_target(metadata), deletes, reader).files[0]["file-format"] == file_format
    for write_refused_deletes in (
        lambda target: write_deletes(target, deletes, build_table_and_deletes(1)[1]),
        lambda target: write_equality_deletes(target, pa.table({"id": [1]}), ["id"]),
    ):
        with pytest.raises(Unwritable, match="version 1"):
            write_refused_deletes(build_target(build_table_and_deletes(1)[0]))


def test_negative_and_repeated_positions_are_refused(tmp_path: Path) -> None:
    metadata = build_metadata(tmp_path, SCHEMA)
    reader = Deletes(Storage(), metadata)
    with pytest.raises(ValueError, match="no row -1"):
        write_deletes(build_target(metadata), [DeletedRows("file:///a", 0, [], build_positions(3, -1))], reader)
    with pytest.raises(ValueError, match="occurs twice"):
        write_deletes(build_target(metadata), [DeletedRows("file:///a", 0, [], build_positions(3))] * 2, reader)


def test_seamarks_reader_leaves_out_deleted_rows(tmp_path: Path) -> None:
    metadata = build_metadata(tmp_path, SCHEMA)
    write_target, reader = build_target(metadata), Deletes(Storage(), metadata)
    (file,) = write_batches(write_target, pa.table({"id": list(range(10))}).to_batches()).files
    path = file["file-path"]
    deletes: tuple[dict[str, Any], ...] = ()
    for removed_ids in ((3, 4), (4, 9), (0,)):
        deletes = write_deletes(
            write_target, [DeletedRows(path, 0, [], build_positions(*removed_ids), deletes)], reader
        ).files
    mask = reader.load(path, deletes).mark_deleted_positions(0, 10)
    assert mask is not None
    assert np.flatnonzero(~mask).tolist() == [1, 2, 5, 6, 7, 8]


@pytest.mark.parametrize("version", [2, 3])
def test_data_file_without_remaining_rows_is_removed(tmp_path: Path, version: int) -> None:
    metadata = build_metadata(tmp_path, SCHEMA, version=version)
    new_target, reader = build_target(metadata), Deletes(Storage(), metadata)
    a, b = "file:///a.parquet", "file:///b.parquet"
    first_deletes = write_deletes(
        new_target,
        [DeletedRows(a, 0, [], build_positions(0, 2), records=4), DeletedRows(b, 0, [], build_positions(1), records=2)],
        reader,
    )
    assert first_deletes.removed == ()
    old_deletes = {
        path: [file for file in first_deletes.files if file.get("referenced-data-file") in (path, None)]
        for path in (a, b)
    }
    files_before = list_files(tmp_path)
    second_deletes = write_deletes(
        new_target, [DeletedRows(a, 0, [], build_positions(1, 3), old_deletes[a], records=4)], reader
    )
    assert (second_deletes.files, second_deletes.removed) == ((), ({"file-path": a},)), (
        "the data file's own deletes are removed with it"
    )
    assert list_files(tmp_path) == files_before
    rows = [
        DeletedRows(a, 0, [], build_positions(1), old_deletes[a], records=4),
        DeletedRows(b, 0, [], build_positions(0), old_deletes[b], records=2),
    ]
    third_deletes = write_deletes(new_target, rows, reader)
    assert third_deletes.removed[0] == {"file-path": b}
    assert [read_deleted_positions(file, a) for file in third_deletes.files] == [[0, 1, 2] if version == 3 else [1]]
    assert all(read_deleted_positions(file, b) == [] for file in third_deletes.files if version == 2)


def test_data_file_is_kept_if_its_remaining_rows_are_unknown(tmp_path: Path) -> None:
    """The number of the remaining rows is known only if each deleted row is counted once.

    The number of rows that equality deletes remove is unknown. Positions that are deleted twice count once. In the last
    case, the number of rows in the data file is missing.
    """
    metadata = build_metadata(tmp_path, SCHEMA)
    new_target, reader, a = build_target(metadata), Deletes(Storage(), metadata), "file:///a.parquet"
    equality_deletes = write_equality_deletes(new_target, pa.table({"id": [1]}), ["id"]).files
    (vector,) = write_deletes(
        new_target, [DeletedRows(a, 0, [], build_positions(0, 1), equality_deletes, records=3)], reader
    ).files
    assert read_deleted_positions(vector, a) == [0, 1]
    second_deletes = write_deletes(
        new_target, [DeletedRows(a, 0, [], build_positions(0, 1), [vector], records=4)], reader
    )
    assert second_deletes == WrittenDeletes()
    deletes_without_row_count = write_deletes(new_target, [DeletedRows(a, 0, [], build_positions(0, 1, 2))], reader)
    assert (len(deletes_without_row_count.files), deletes_without_row_count.removed) == (1, ())
