"""Tests of the data files of batches: each row is in one file of its partition, in order, and no file is too large."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.partitioning import PartitionKey
from pyiceberg.table.locations import load_location_provider

from seamark.connector.arrow.casting import Unwritable, build_arrow_schema, conform
from seamark.connector.client.storage import Storage
from seamark.connector.index.files import DataFile, index_data_files
from seamark.connector.write.appends import to_batches
from seamark.connector.write.data_files import FileWriter
from seamark.connector.write.locations import format_partition_path, make_data_location
from seamark.connector.write.table_writer import TableWriter, WriteLimits, WrittenFiles, write_batches
from seamark.connector.write.target import WriteTarget, create_target
from seamark.formats.iceberg.manifests.content_file import decode_content_file
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.formats.iceberg.types.transforms import compute_transform
from seamark.formats.index.index_file import open_index_file
from seamark.formats.protocol.wire import INDEX_FOLDER
from tests.connector.write.written import build_metadata, build_order, build_spec, build_target, read_by_pyiceberg
from tests.services.s3 import S3

SCHEMA = Schema((Field(1, "id", True, "long"), Field(2, "name", False, "string"), Field(3, "day", False, "date")))
INDEX_PROPERTIES = {
    "seamark.index.names": "bloom(lower(name))",
    "seamark.index.days": "bitmap(day)",
    "seamark.index.ids": "record(id)",
}


EPOCH_ORDINAL = 719_163
"""Python's number of the day 1970-01-01. Iceberg counts days from there."""


def build_rows(count: int, seed: int = 1) -> pa.Table:
    """Return random rows with unique ids, by which a test identifies them. Some names and days are null."""
    rng = random.Random(seed)
    return pa.table(
        {
            "id": rng.sample(range(10 * count), count),
            "name": [rng.choice([None, "Ab", rng.randbytes(10).hex()]) for _ in range(count)],
            "day": pa.array([rng.choice([None, *range(5)]) for _ in range(count)], pa.int32()).cast(pa.date32()),
        }
    )


def sort_rows_by_id(table: pa.Table) -> list[dict[str, Any]]:
    values: list[dict[str, Any]] = table.sort_by("id").to_pylist()
    return values


def read_ids(file: dict[str, Any]) -> list[int]:
    with pq.ParquetFile(file["file-path"].removeprefix("file://")) as parquet_file:
        ids: list[int] = parquet_file.read(columns=["id"])["id"].to_pylist()
    return ids


def check_files(metadata: TableMetadata, written_files: WrittenFiles, input_table: pa.Table) -> None:
    """Check that each row is written once, in its partition, and that the files match their description."""
    assert sort_rows_by_id(read_by_pyiceberg(metadata, written_files.files)) == sort_rows_by_id(input_table)
    assert written_files.rows == input_table.num_rows
    values = {row["id"]: row for row in input_table.to_pylist()}
    for content_file_json in written_files.files:
        file = decode_content_file(content_file_json, metadata)
        path = Path(file.file_path.removeprefix("file://"))
        assert path.stat().st_size == file.file_size_in_bytes
        ids = read_ids(content_file_json)
        assert len(ids) == file.record_count
        for id_ in ids:
            row = values[id_]
            day = None if row["day"] is None else row["day"].toordinal() - EPOCH_ORDINAL
            encoded_values = {1: row["id"], 2: row["name"], 3: day}
            for field, value in zip(metadata.default_spec.fields, file.partition, strict=True):
                column = SCHEMA.column(field.sources[0])
                assert column is not None
                assert isinstance(column.type, str)
                assert compute_transform(field.transform, column.type, encoded_values[column.id]) == value


LIMITS = {
    "default limits": WriteLimits(),
    "little memory": WriteLimits(buffered_bytes=10_000),
    "few files open": WriteLimits(buffered_bytes=10_000, open_files=2, index_bytes=99),
}
SPECS: dict[str, Any] = {
    "unpartitioned": (),
    "buckets": (("bucket[4]", 1),),
    "many partitions": (("identity", 3), ("truncate[1]", 2)),
}
ORDERS: dict[str, Any] = {
    "unsorted": (),
    "sorted": (("identity", 2, "desc", "nulls-last"), ("bucket[4]", 1, "asc", "nulls-first")),
}
SLOW_CASES = {
    *(("little memory", "many partitions", order) for order in ORDERS),
    ("few files open", "many partitions", "sorted"),
}
"""The cases that write the most files. The fast tests include many partitions with the lowest limits, unsorted."""


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("limits", "fields", "sort_fields"),
    [
        pytest.param(
            LIMITS[limit],
            SPECS[spec],
            ORDERS[order],
            id=f"{limit}, {spec}, {order}",
            marks=[pytest.mark.slow] if (limit, spec, order) in SLOW_CASES else [],
        )
        for limit in LIMITS
        for spec in SPECS
        for order in ORDERS
    ],
)
def test_every_row_is_written_once_into_its_partition(
    tmp_path: Path, fields: Any, sort_fields: Any, limits: WriteLimits
) -> None:
    sort_order = build_order(*sort_fields) if sort_fields else _make_unsorted_order()
    metadata = build_metadata(
        tmp_path,
        SCHEMA,
        spec=build_spec(*fields),
        order=sort_order,
        properties=INDEX_PROPERTIES,
    )
    input_rows = build_rows(1500)
    written_files = write_batches(build_target(metadata), input_rows.to_batches(max_chunksize=200), limits=limits)
    check_files(metadata, written_files, input_rows)
    check_indexes(build_target(metadata), written_files)
    assert {file["sort-order-id"] for file in written_files.files} == {1 if sort_fields else 0}
    for file in written_files.files if sort_fields else ():
        names = _read_column(file, "name")
        present_values = [name for name in names if name is not None]
        assert names == present_values + [None] * (len(names) - len(present_values))
        assert present_values == sorted(present_values, key=str.encode, reverse=True)


def _make_unsorted_order() -> Any:
    return build_metadata("file:///nowhere", SCHEMA).sort_orders[0]


def _read_column(file: dict[str, Any], name: str) -> list[Any]:
    with pq.ParquetFile(file["file-path"].removeprefix("file://")) as parquet_file:
        values: list[Any] = parquet_file.read(columns=[name])[name].to_pylist()
    return values


def check_indexes(write_target: WriteTarget, written_files: WrittenFiles) -> None:
    """Check that the writer has put index files into the index folder of the table, one for each index.

    Each of them must have the bytes that an index build makes of the same data files.
    """
    assert written_files.skipped == ()
    assert len(written_files.index_files) == len(write_target.indexes)
    files = [
        DataFile(file["file-path"], file["file-size-in-bytes"], file["record-count"]) for file in written_files.files
    ]
    expected_data_by_index = {}
    for task in write_target.indexes:
        location = index_data_files(task, files).location
        assert location is not None
        expected_data_by_index[task.definition.id] = Path(location.removeprefix("file://")).read_bytes()
    for index_file_json in written_files.index_files:
        assert index_file_json["location"].startswith(f"{write_target.location}/{INDEX_FOLDER}/")
        data = Path(index_file_json["location"].removeprefix("file://")).read_bytes()
        assert len(data) == index_file_json["size-in-bytes"]
        index_file = open_index_file(data, index_file_json["location"])
        assert data == expected_data_by_index.pop(index_file.header.definition)
    assert expected_data_by_index == {}


@pytest.mark.slow
def test_files_have_the_target_size(tmp_path: Path) -> None:
    target_bytes = 150_000
    properties = {"write.target-file-size-bytes": str(target_bytes), "write.parquet.row-group-size-bytes": "40000"}
    for sort_order in (_make_unsorted_order(), build_order(("identity", 2, "asc", "nulls-first"))):
        metadata = build_metadata(
            tmp_path, SCHEMA, spec=build_spec(("bucket[2]", 1)), order=sort_order, properties=properties
        )
        input_rows = build_rows(120_000)
        written_files = write_batches(build_target(metadata), input_rows.to_batches())
        check_files(metadata, written_files, input_rows)
        sizes = sorted(file["file-size-in-bytes"] for file in written_files.files)
        assert len(sizes) > 6
        assert sizes[-1] < 2 * target_bytes
        assert sizes[2] > target_bytes / 2, "all files but the last of each bucket are full"
        row_group_counts = [len(file["split-offsets"]) for file in written_files.files]
        assert max(row_group_counts) >= 3


def test_memory_of_a_writer_is_limited(tmp_path: Path) -> None:
    """A writer with a buffer of 4 MiB uses less than 40 MiB of Arrow's memory, and frees it when it ends."""
    metadata = build_metadata(tmp_path, SCHEMA, spec=build_spec(("bucket[16]", 1)))
    batch_rows = 20_000

    def build_batches() -> Iterator[pa.RecordBatch]:
        for batch_number in range(30):
            start = batch_number * batch_rows
            ids = pa.array(range(start, start + batch_rows), pa.int64())
            names = pa.array([f"{number:0100d}" for number in range(batch_rows)])
            yield pa.RecordBatch.from_pydict({"id": ids, "name": names})

    bytes_before = pa.total_allocated_bytes()
    added_bytes_max = 0
    with TableWriter(build_target(metadata), WriteLimits(buffered_bytes=4 << 20)) as writer:
        for batch in build_batches():
            writer.write(batch)
            del batch
            added_bytes_max = max(added_bytes_max, pa.total_allocated_bytes() - bytes_before)
        written_files = writer.close()
    assert written_files.rows == 30 * batch_rows
    assert added_bytes_max < 40 << 20, "the input has 70 MB"
    del writer
    assert pa.total_allocated_bytes() - bytes_before < 1 << 20


def test_writer_of_many_partitions_has_few_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_writer_ids: set[int] = set()
    open_writers_max = 0
    open_writer, close = FileWriter._open_writer, FileWriter.close

    def open_and_record(self: FileWriter, count: int) -> Any:
        nonlocal open_writers_max
        open_writer_ids.add(id(self))
        open_writers_max = max(open_writers_max, len(open_writer_ids))
        return open_writer(self, count)

    def close_and_forget(self: FileWriter) -> dict[str, Any]:
        data_file = close(self)
        open_writer_ids.discard(id(self))
        return data_file

    monkeypatch.setattr(FileWriter, "_open_writer", open_and_record)
    monkeypatch.setattr(FileWriter, "close", close_and_forget)
    metadata = build_metadata(tmp_path, SCHEMA, spec=build_spec(("bucket[100]", 1)))
    input_rows = build_rows(1000)
    limits = WriteLimits(buffered_bytes=300_000, open_files=7)
    written_files = write_batches(build_target(metadata), input_rows.to_batches(max_chunksize=100), limits=limits)
    check_files(metadata, written_files, input_rows)
    assert open_writers_max == 7
    assert len(written_files.files) < 400, "there must not be a file for each batch and partition"


def test_zeros_of_two_signs_are_two_partitions_and_nan_is_one(tmp_path: Path) -> None:
    schema = Schema((Field(1, "ratio", False, "double"),))
    metadata = build_metadata(tmp_path, schema, spec=build_spec(("identity", 1)))
    batches = [pa.RecordBatch.from_pydict({"ratio": [0.0, -0.0, float("nan"), None]}) for _ in range(3)]
    written_files = write_batches(build_target(metadata), batches)
    assert sorted(str(file["partition"]) for file in written_files.files) == ["['NaN']", "[-0.0]", "[0.0]", "[None]"]
    for file in written_files.files:
        assert {str(value) for value in _read_column(file, "ratio")} == {
            str(file["partition"][0]).replace("NaN", "nan")
        }


def test_failed_write_of_an_invalid_row_leaves_no_file(tmp_path: Path) -> None:
    metadata = build_metadata(tmp_path, SCHEMA, spec=build_spec(("identity", 2)), properties=INDEX_PROPERTIES)
    bad_batch = pa.RecordBatch.from_pydict({"id": pa.array([None], pa.int64())})
    with pytest.raises(Unwritable, match="column id is required"):
        write_batches(
            build_target(metadata),
            [*build_rows(2000).to_batches(), bad_batch],
            limits=WriteLimits(buffered_bytes=1000, open_files=3),
        )
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_storage_failure_during_a_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = build_metadata(tmp_path, SCHEMA, spec=build_spec(("bucket[4]", 1)), properties=INDEX_PROPERTIES)
    calls_left = 3
    write = FileWriter.write

    def write_and_fail(self: FileWriter, input_table: pa.Table) -> None:
        nonlocal calls_left
        calls_left -= 1
        if calls_left < 0:
            raise OSError("the disk is full")
        write(self, input_table)

    monkeypatch.setattr(FileWriter, "write", write_and_fail)
    with pytest.raises(OSError, match="full"):
        write_batches(build_target(metadata), build_rows(2000).to_batches(), limits=WriteLimits(buffered_bytes=5000))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.slow
def test_files_are_written_to_s3_and_discarded(s3: S3, s3_bucket: str) -> None:
    storage = Storage(
        {
            "s3.endpoint": s3.endpoint,
            "s3.region": s3.region,
            "s3.access-key-id": s3.access_key,
            "s3.secret-access-key": s3.secret_key,
        }
    )
    location = f"s3://{s3_bucket}/db/t"
    write_target = create_target(
        build_metadata(location, SCHEMA, spec=build_spec(("identity", 2)), properties=INDEX_PROPERTIES), storage
    )
    input_rows = build_rows(300)

    def list_objects() -> dict[str, int]:
        objects = s3.client().list_objects_v2(Bucket=s3_bucket)
        # Arrow does not delete the folders, which are objects without content.
        keys = [entry for entry in objects.get("Contents", ()) if not entry["Key"].endswith("/")]
        return {f"s3://{s3_bucket}/{key['Key']}": key["Size"] for key in keys}

    written_files = write_batches(write_target, input_rows.to_batches())
    assert list_objects() == {file["file-path"]: file["file-size-in-bytes"] for file in written_files.files} | {
        index_file["location"]: index_file["size-in-bytes"] for index_file in written_files.index_files
    }
    tables = [pq.read_table(pa.BufferReader(storage.read(file["file-path"]))) for file in written_files.files]
    assert sorted(value for file in tables for value in file["id"].to_pylist()) == sorted(input_rows["id"].to_pylist())
    written_files.discard(storage)
    assert list_objects() == {}
    bad_batch = pa.RecordBatch.from_pydict({"id": pa.array([None], pa.int64())})
    # The small limits make the writer store files before it reads the bad batch.
    with pytest.raises(Unwritable, match="column id is required"):
        write_batches(
            write_target, [*input_rows.to_batches(), bad_batch], limits=WriteLimits(buffered_bytes=1000, open_files=3)
        )
    assert list_objects() == {}


def test_table_with_required_encryption_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(Unwritable, match="encrypted"):
        build_target(build_metadata(tmp_path, SCHEMA, properties={"encryption.key-id": "k1"}))


def test_written_files_can_be_discarded_twice(tmp_path: Path) -> None:
    metadata = build_metadata(tmp_path, SCHEMA, properties=INDEX_PROPERTIES)
    written_files = write_batches(build_target(metadata), build_rows(10).to_batches())
    # A data file and an index file of each index.
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1 + len(INDEX_PROPERTIES)
    for _ in range(2):
        written_files.discard(Storage())
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_write_succeeds_if_the_index_keys_of_a_column_cannot_be_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = build_metadata(tmp_path, SCHEMA, properties={"seamark.index.more": "bloom(name)", **INDEX_PROPERTIES})

    def fail(*_: object) -> Any:
        raise ValueError("the key service does not answer")

    monkeypatch.setattr("seamark.connector.index.files.compute_term_keys", fail)
    written_files = write_batches(build_target(metadata), build_rows(10).to_batches())
    assert written_files.rows == 10
    assert written_files.index_files == ()
    assert [path for path, _ in written_files.skipped] == [written_files.files[0]["file-path"]] * 4
    assert all("the key service does not answer" in reason for _, reason in written_files.skipped)


def test_used_target_can_be_pickled(tmp_path: Path) -> None:
    metadata = build_metadata(
        tmp_path, SCHEMA, spec=build_spec(("day", 3)), order=build_order(("identity", 1, "asc", "nulls-first"))
    )
    write_target = build_target(metadata)
    write_batches(write_target, build_rows(3).to_batches())
    unpickled_target = pickle.loads(pickle.dumps(write_target))
    assert unpickled_target == write_target
    input_rows = build_rows(100)
    check_files(metadata, write_batches(unpickled_target, input_rows.to_batches()), input_rows)


def test_write_without_rows_makes_no_file(tmp_path: Path) -> None:
    metadata = build_metadata(tmp_path, SCHEMA, properties=INDEX_PROPERTIES)
    assert write_batches(build_target(metadata), []) == WrittenFiles()
    assert write_batches(build_target(metadata), build_rows(3).slice(0, 0).to_batches()) == WrittenFiles()
    assert not list(tmp_path.rglob("*"))


def test_rows_are_accepted_in_every_form_of_arrow() -> None:
    input_rows = build_rows(10)
    batch = input_rows.to_batches()[0]
    reader = pa.RecordBatchReader.from_batches(input_rows.schema, [batch, batch])

    class ArrowStreamable:
        def __arrow_c_stream__(self, requested_schema: object = None) -> object:
            return input_rows.__arrow_c_stream__(requested_schema)

    forms: list[tuple[Any, int]] = [
        (input_rows, 10),
        (batch, 10),
        (reader, 20),
        (ArrowStreamable(), 10),
        ([batch, input_rows], 20),
    ]
    for form, count in forms:
        assert sum(batch.num_rows for batch in to_batches(form)) == count
    for invalid_value in ({"id": [1]}, "rows", 7):
        with pytest.raises(Unwritable, match=type(invalid_value).__name__):
            list(to_batches(invalid_value))


# Locations of files


PARTITION_CASES = {
    "identity": (["name", "a day"], ["identity", "day"], ["string", "date"], ["x/y ü%", 19_000]),
    "null": (["name"], ["truncate[2]"], ["string"], [None]),
    "numbers": (["b", "y", "m", "h"], ["bucket[4]", "year", "month", "hour"], ["int"] * 4, [3, 50, 649, 438_291]),
    "before 1970": (["y", "m", "h", "d"], ["year", "month", "hour", "day"], ["int"] * 3 + ["date"], [-1, -1, -1, -1]),
    "bytes": (["b", "f"], ["identity", "identity"], ["binary", "boolean"], [b"\xff\0", True]),
}
"""Of each partition: the names of the fields, their transforms, their result types and their values."""


@pytest.mark.parametrize("name", PARTITION_CASES)
def test_partition_folders_have_the_names_that_iceberg_gives_them(name: str) -> None:
    expected = {
        "identity": "name=x%2Fy+%C3%BC%25/a+day=2022-01-08",
        "null": "name=null",
        "numbers": "b=3/y=2020/m=2024-02/h=2020-01-01-03",
        "before 1970": "y=1969/m=1969-12/h=1969-12-31-23/d=1969-12-31",
        "bytes": "b=%2FwA%3D/f=true",
    }
    assert format_partition_path(*PARTITION_CASES[name]) == expected[name]


@pytest.mark.parametrize(
    "properties",
    [
        {},
        {"write.data.path": "s3://other/place/"},
        {"write.object-storage.enabled": "true"},
        {"write.object-storage.enabled": "true", "write.object-storage.partitioned-paths": "false"},
    ],
    ids=str,
)
def test_files_have_the_locations_that_pyiceberg_gives_them(properties: dict[str, str]) -> None:
    iceberg_provider = load_location_provider("s3://lake/db/t", properties)
    assert make_data_location("s3://lake/db/t", properties, "", "f.parquet") == iceberg_provider.new_data_location(
        "f.parquet"
    )

    class Key(PartitionKey):
        def __init__(self) -> None: ...

        def to_path(self) -> str:
            return "p=1"

    assert make_data_location("s3://lake/db/t", properties, "p=1", "f.parquet") == iceberg_provider.new_data_location(
        "f.parquet", Key()
    )


def test_entropy_precedes_the_tables_name_in_a_shared_folder() -> None:
    """A location has the shared folder, random characters and the table's name, as in Iceberg's Java library."""
    properties = {"write.object-storage.enabled": "true", "write.data.path": "s3://other/place"}
    location = make_data_location("s3://lake/db/t", properties, "p=1", "f.parquet")
    assert location.startswith("s3://other/place/")
    assert location.endswith("/db/t/p=1/f.parquet")


def test_names_of_files_begin_with_their_bucket_number(tmp_path: Path) -> None:
    write_target = build_target(build_metadata(tmp_path, SCHEMA, spec=build_spec(("day", 3), ("bucket[16]", 1))))
    names = {write_target.generate_location((0, 7)).rpartition("/")[2] for _ in range(100)}
    assert len(names) == 100
    assert all(name.startswith("00000007-") for name in names)
    assert not write_target.generate_location((0, None)).rpartition("/")[2].startswith("0000000")


def test_rows_that_need_no_cast_are_checked_like_cast_rows() -> None:
    schema = Schema((Field(1, "id", True, "long"), Field(2, "a b", False, "string")))
    arrow = build_arrow_schema(schema)
    ids, texts = pa.array([1, 2]), pa.array(["x", None], pa.large_string())
    conformed_rows = conform(pa.RecordBatch.from_arrays([ids, texts], names=["id", "a b"]), schema, arrow)
    assert conformed_rows.schema.equals(arrow, check_metadata=True)
    assert conformed_rows.to_pydict() == {"id": [1, 2], "a_x20b": ["x", None]}
    with pytest.raises(Unwritable, match="column id is required"):
        conform(pa.RecordBatch.from_arrays([pa.array([1, None]), texts], names=["id", "a b"]), schema, arrow)
    with pytest.raises(Unwritable, match="no column a_x20b"):  # a_x20b is the name in files, not the column.
        conform(pa.RecordBatch.from_arrays([ids, texts], names=["id", "a_x20b"]), schema, arrow)
