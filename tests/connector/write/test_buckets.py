"""Bucket sizes and advice, the partition spec after a resize, and the command for both."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.transforms import BucketTransform
from pyiceberg.types import LongType

from seamark.connector.client.errors import Conflict, InvalidRequest, NoSuchResource
from seamark.connector.client.indexes import IndexClient
from seamark.connector.write import buckets
from seamark.connector.write.appends import append
from seamark.connector.write.buckets import ResizeResult, compute_bucket_sizes, resize
from seamark.connector.write.upserts import upsert
from tests.connector.write.test_upserts import build_rows, create_upsert_table, read_rows
from tests.support.commands import invoke_seamark


def compute_bucket(bucket_count: int, key: int) -> int:
    """Return the bucket of the key, computed by PyIceberg."""
    return int(BucketTransform(bucket_count).transform(LongType())(key) or 0)


def build_key_rows(keys: list[int], land: str | None = None) -> pa.Table:
    return build_rows(*((key, land) for key in keys))


def load_metadata(client: IndexClient) -> dict[str, Any]:
    metadata: dict[str, Any] = json.loads(client.load_table("db.t").metadata)
    return metadata


def read_spec_fields(client: IndexClient) -> list[tuple[str, str, int]]:
    """Return (name, transform, field id) of each field in the default spec."""
    metadata = load_metadata(client)
    spec = next(
        partition_spec
        for partition_spec in metadata["partition-specs"]
        if partition_spec["spec-id"] == metadata["default-spec-id"]
    )
    return [(field["name"], field["transform"], field["field-id"]) for field in spec["fields"]]


def apply_updates(client: IndexClient, *updates: dict[str, Any]) -> None:
    body = json.dumps({"requirements": [], "updates": list(updates)}).encode()
    client._request("POST", "/v1/namespaces/db/tables/t", {}, body)


def set_spec(client: IndexClient, *parts: tuple[str, str, int]) -> None:
    """Set a default spec with fields of (name, transform, source id)."""
    fields = [{"name": name, "transform": transform, "source-id": source} for name, transform, source in parts]
    spec = {"action": "add-spec", "spec": {"spec-id": 0, "fields": fields}}
    apply_updates(client, spec, {"action": "set-default-spec", "spec-id": -1})


# Sizes


def test_bucket_sizes_have_the_files_rows_and_bytes_of_each_bucket(client: IndexClient) -> None:
    create_upsert_table(client, spec=[("bucket[4]", 1)])
    for start in (0, 100):
        append(client, "db.t", build_key_rows(list(range(start, start + 100))))
    (bucket_size,) = compute_bucket_sizes(client, "db.t")
    expected = [sum(compute_bucket(4, key) == number for key in range(200)) for number in range(4)]
    assert (bucket_size.column, bucket_size.field, bucket_size.buckets, bucket_size.rows.tolist()) == (
        "id",
        "p0",
        4,
        expected,
    )
    assert bucket_size.files.tolist() == [2] * 4
    files = client.files("db.t")
    assert bucket_size.bytes.sum() == sum(files["file_size_in_bytes"].to_pylist()) == bucket_size.partition_bytes
    assert bucket_size.largest_bytes == max(bucket_size.bytes.tolist())
    assert (bucket_size.shared_files, bucket_size.shared_bytes) == (0, 0)


def test_files_written_with_fewer_buckets_count_in_every_bucket_that_may_have_their_rows(client: IndexClient) -> None:
    create_upsert_table(client)
    append(client, "db.t", build_key_rows([1]))  # The file of this append has no bucket.
    set_spec(client, ("b", "bucket[2]", 1))
    key_of_bucket_1 = next(number for number in range(100) if compute_bucket(2, number) == 1)
    append(client, "db.t", build_key_rows([key_of_bucket_1] * 8))
    resize(client, "db.t", buckets=4)
    key_of_bucket_3 = next(number for number in range(100) if compute_bucket(4, number) == 3)
    append(client, "db.t", build_key_rows([key_of_bucket_3] * 5))
    (bucket_size,) = compute_bucket_sizes(client, "db.t")
    assert bucket_size.files.tolist() == [1, 2, 1, 3]
    # The row of the unbucketed file counts in bucket 0. Buckets 1 and 3 share the 8 rows of bucket 1 of 2, and bucket 3
    # also has the 5 rows of the last file.
    assert bucket_size.rows.tolist() == [1, 4, 0, 9]
    assert bucket_size.shared_files == 2
    file_size_by_spec = {value["spec_id"]: value["file_size_in_bytes"] for value in client.files("db.t").to_pylist()}
    assert bucket_size.shared_bytes == file_size_by_spec[0] + file_size_by_spec[1]
    # Bucket 3 gets a quarter of the file without a bucket, half of the file of bucket 1 of 2, and the whole last file.
    assert (
        abs(int(bucket_size.bytes[3]) - (file_size_by_spec[0] / 4 + file_size_by_spec[1] / 2 + file_size_by_spec[2]))
        < 1
    )
    apply_updates(client, {"action": "set-default-spec", "spec-id": 1})
    (coarse_sizes,) = compute_bucket_sizes(client, "db.t")
    assert (coarse_sizes.buckets, coarse_sizes.files.tolist(), coarse_sizes.shared_files) == (2, [1, 3], 1)


@pytest.mark.slow
def test_bucket_sizes_for_too_many_buckets_are_refused(client: IndexClient) -> None:
    create_upsert_table(client, spec=[("bucket[1048576]", 1)])
    append(client, "db.t", build_key_rows([1, 2]))
    (bucket_size,) = compute_bucket_sizes(client, "db.t")
    assert (bucket_size.buckets, bucket_size.rows.sum()) == (1 << 20, 2)
    set_spec(client, ("b", "bucket[1048577]", 1))
    with pytest.raises(InvalidRequest, match="b has 1,048,577 buckets; sizes are reported for at most 1,048,576"):
        compute_bucket_sizes(client, "db.t")


def test_advised_bucket_count_is_the_doubling_nearest_to_the_target_size(client: IndexClient) -> None:
    create_upsert_table(client, spec=[("bucket[4]", 1)])
    append(client, "db.t", build_key_rows(list(range(1000))))
    total = int(compute_bucket_sizes(client, "db.t")[0].bytes.sum())
    for divisor, advice in ((1, 4), (4, 4), (5, 4), (6, 8), (11, 8), (12, 16), (64, 64), (100, 128)):
        (bucket_size,) = compute_bucket_sizes(client, "db.t", target_bytes=total // divisor)
        assert bucket_size.advice == advice, f"the target is a {divisor}th part of the table"
    with pytest.raises(ValueError, match="target_bytes is 0"):
        compute_bucket_sizes(client, "db.t", target_bytes=0)


@pytest.mark.slow
def test_bucket_sizes_are_advised_for_the_partition_with_the_median_byte(
    client: IndexClient,
) -> None:
    """If the partitions are ordered by size, the middle byte of the table is in the partition of the advice."""
    create_upsert_table(client, spec=[("identity", 2), ("bucket[2]", 1)])
    for land, row_count in (("de", 3000), ("fr", 3000), ("it", 10), (None, 10)):
        append(client, "db.t", build_key_rows(list(range(row_count)), land))
    (bucket_size,) = compute_bucket_sizes(client, "db.t")
    bytes_by_land: dict[str, int] = {}
    files = client.files("db.t")
    for text, size in zip(*(files[name].to_pylist() for name in ("partition", "file_size_in_bytes")), strict=True):
        land = json.loads(text)["p0"]
        bytes_by_land[land] = bytes_by_land.get(land, 0) + size
    assert bucket_size.partition_bytes in (bytes_by_land["de"], bytes_by_land["fr"])
    assert int(bucket_size.bytes.sum()) == sum(bytes_by_land.values())
    assert compute_bucket_sizes(client, "db.t", target_bytes=bytes_by_land["de"] // 2)[0].advice == 2


@pytest.mark.slow
def test_bucket_sizes_are_empty_without_rows_or_buckets(client: IndexClient) -> None:
    create_upsert_table(client, spec=[("bucket[4]", 1), ("bucket[2]", 2)])
    sizes = compute_bucket_sizes(client, "db.t")
    assert [
        (bucket_size.column, bucket_size.buckets, bucket_size.advice, bucket_size.skew) for bucket_size in sizes
    ] == [
        ("id", 4, 4, 1.0),
        ("land", 2, 2, 1.0),
    ]
    append(client, "db.t", build_rows((1, None)))
    # Null is in no bucket.
    assert [bucket_size.rows.sum() for bucket_size in compute_bucket_sizes(client, "db.t")] == [1, 0]
    create_upsert_table(client, "plain", spec=[("truncate[4]", 1)])
    assert compute_bucket_sizes(client, "db.plain") == []


# Resize


def test_resize_changes_one_field_of_the_spec_and_nothing_else(client: IndexClient) -> None:
    create_upsert_table(client, spec=[("identity", 2), ("bucket[8]", 1), ("truncate[2]", 4)])
    append(client, "db.t", build_key_rows([1, 2, 3], "de"))
    metadata_before = load_metadata(client)
    assert resize(client, "db.t", buckets=16) == ResizeResult("id", 8, 16, 1)
    assert read_spec_fields(client) == [
        ("p0", "identity", 1000),
        ("id_bucket_16", "bucket[16]", 1003),
        ("p2", "truncate[2]", 1002),
    ]
    metadata_after = load_metadata(client)
    changed_fields = {name for name in metadata_after if metadata_after[name] != metadata_before.get(name)}
    assert changed_fields <= {
        "partition-specs",
        "default-spec-id",
        "last-partition-id",
        "last-updated-ms",
        "metadata-log",
    }
    assert read_rows(client) == [(1, "de", None, None), (2, "de", None, None), (3, "de", None, None)]


def test_repeated_resize_changes_nothing(client: IndexClient) -> None:
    create_upsert_table(client, spec=[("bucket[8]", 1)])
    resize(client, "db.t", buckets=64)  # One resize may double the buckets several times.
    metadata = load_metadata(client)
    assert resize(client, "db.t", buckets=64) == ResizeResult("id", 64, 64, 1)
    assert load_metadata(client) == metadata


@pytest.mark.slow
def test_resize_to_an_earlier_bucket_count_reuses_its_field(client: IndexClient) -> None:
    create_upsert_table(client, spec=[("bucket[8]", 1)])
    resize(client, "db.t", buckets=16)
    resize(client, "db.t", buckets=32)
    assert read_spec_fields(client) == [("id_bucket_32", "bucket[32]", 1002)]
    apply_updates(client, {"action": "set-default-spec", "spec-id": 0})
    assert resize(client, "db.t", buckets=16).spec_id == 1
    assert read_spec_fields(client) == [("id_bucket_16", "bucket[16]", 1001)]


@pytest.mark.slow
def test_resize_gives_the_new_field_an_unused_name(client: IndexClient) -> None:
    create_upsert_table(client, spec=[("bucket[2]", 1)])
    apply_updates(
        client,
        {
            "action": "add-schema",
            "schema": {
                "type": "struct",
                "fields": [
                    {"id": 1, "name": "id", "required": True, "type": "long"},
                    {"id": 2, "name": "land", "required": False, "type": "string"},
                    {"id": 5, "name": "id_bucket_4", "required": False, "type": "int"},
                ],
            },
        },
        {"action": "set-current-schema", "schema-id": -1},
    )
    set_spec(client, ("id_bucket_4_2", "bucket[4]", 2), ("p0", "bucket[2]", 1))
    resize(client, "db.t", buckets=4, column="id")
    assert [field[:2] for field in read_spec_fields(client)] == [
        ("id_bucket_4_2", "bucket[4]"),
        ("id_bucket_4_3", "bucket[4]"),
    ]


def test_resize_of_version_1_keeps_the_old_field_as_void(client: IndexClient) -> None:
    create_upsert_table(client, version=1, spec=[("bucket[2]", 1), ("identity", 2)])
    append(client, "db.t", build_key_rows([1, 2, 3], "de"))
    resize(client, "db.t", buckets=4)
    assert read_spec_fields(client) == [
        ("p0", "void", 1000),
        ("p1", "identity", 1001),
        ("id_bucket_4", "bucket[4]", 1002),
    ]
    append(client, "db.t", build_key_rows([4, 5, 6], "fr"))
    resize(client, "db.t", buckets=8)
    assert [field[1:] for field in read_spec_fields(client)] == [
        ("void", 1000),
        ("identity", 1001),
        ("void", 1002),
        ("bucket[8]", 1003),
    ]
    append(client, "db.t", build_key_rows([7], "it"))
    assert [row[:2] for row in read_rows(client)] == [
        *((n, "de") for n in (1, 2, 3)),
        *((n, "fr") for n in (4, 5, 6)),
        (7, "it"),
    ]
    (bucket_size,) = compute_bucket_sizes(client, "db.t")
    assert bucket_size.buckets == 8
    assert bucket_size.shared_files == len({compute_bucket(2, key) for key in (1, 2, 3)}) + len(
        {compute_bucket(4, key) for key in (4, 5, 6)}
    )


def test_resize_to_a_bucket_count_that_is_no_doubling_is_refused(client: IndexClient) -> None:
    create_upsert_table(client, spec=[("bucket[8]", 1)])
    cases: list[tuple[int, str]] = [
        (4, "8 buckets, and 4 are fewer: the number of buckets can only grow"),
        (1, "can only grow"),
        (12, "12 is not 8 doubled: 16, 32, 64"),
        (24, "24 is not 8 doubled"),
        (0, "0 is not 8 doubled"),
        (-16, "-16 is not 8 doubled"),
        (2**31, "the width must be between 1 and"),
    ]
    for requested_buckets, expected in cases:
        with pytest.raises(InvalidRequest, match=expected):
            resize(client, "db.t", buckets=requested_buckets)
        assert read_spec_fields(client) == [("p0", "bucket[8]", 1000)], requested_buckets


@pytest.mark.slow
def test_resize_requires_a_column_name_if_several_columns_have_buckets(client: IndexClient) -> None:
    create_upsert_table(client, spec=[("bucket[8]", 1), ("bucket[4]", 2)])
    with pytest.raises(InvalidRequest, match="buckets of id, land; give the column"):
        resize(client, "db.t", buckets=16)
    with pytest.raises(InvalidRequest, match="no buckets of note; it has buckets of id, land"):
        resize(client, "db.t", buckets=16, column="note")
    resize(client, "db.t", buckets=16, column="land")
    assert read_spec_fields(client) == [("p0", "bucket[8]", 1000), ("land_bucket_16", "bucket[16]", 1002)]
    create_upsert_table(client, "plain", spec=[("truncate[8]", 1)])
    with pytest.raises(InvalidRequest, match="no buckets; add them first"):
        resize(client, "db.plain", buckets=16)
    with pytest.raises(NoSuchResource):
        resize(client, "db.nope", buckets=16)


def test_resize_is_repeated_after_a_concurrent_change_of_the_spec(
    client: IndexClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_upsert_table(client, spec=[("bucket[8]", 1)])
    bucket_spec = ("p0", "bucket[8]", 1)
    other_specs = [[bucket_spec, ("land", "identity", 2)], [("note", "truncate[1]", 4), bucket_spec]]
    update = buckets._commit_spec

    def set_other_spec_and_update(*arguments: Any) -> Any:
        if other_specs:
            set_spec(client, *other_specs.pop(0))
        return update(*arguments)

    monkeypatch.setattr(buckets, "_commit_spec", set_other_spec_and_update)
    monkeypatch.setattr(buckets, "_WAIT_S", 0)
    assert resize(client, "db.t", buckets=16) == ResizeResult("id", 8, 16, 3)
    assert other_specs == []
    assert [field[0] for field in read_spec_fields(client)] == ["note", "id_bucket_16"]


@pytest.mark.slow
def test_resize_gives_up_after_repeated_conflicts(client: IndexClient, monkeypatch: pytest.MonkeyPatch) -> None:
    create_upsert_table(client, spec=[("bucket[8]", 1)])

    def refuse(*_: object) -> None:
        raise Conflict("Requirement failed", status=409)

    monkeypatch.setattr(buckets, "_commit_spec", refuse)
    monkeypatch.setattr(buckets, "_WAIT_S", 0)
    with pytest.raises(Conflict):
        resize(client, "db.t", buckets=16)


def test_concurrent_resizes_to_the_same_count_make_one_spec(client: IndexClient) -> None:
    create_upsert_table(client, spec=[("bucket[8]", 1)])
    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(resize, IndexClient(client.url), "db.t", buckets=16) for _ in range(6)]
    assert {future.result().buckets for future in futures} == {16}
    assert len(load_metadata(client)["partition-specs"]) == 2


def test_plan_of_a_key_reads_its_old_bucket_and_its_new_bucket(client: IndexClient) -> None:
    create_upsert_table(client, spec=[("bucket[8]", 1)])
    append(client, "db.t", build_key_rows(list(range(400))))
    for bucket_count in (16, 32, 64):
        resize(client, "db.t", buckets=bucket_count)
    # Only every second key is upserted, so old files keep rows and are not removed.
    upsert(client, "db.t", build_key_rows(list(range(1, 2000, 2)), "new"), keys=["id"], mode="merge-on-read")
    planned_files = client.explain("db.t", "id = 7", files=True).kept_files
    assert planned_files is not None
    actual = {tuple(file["partition"].items()) for file in planned_files}
    assert actual == {(("p0", compute_bucket(8, 7)),), (("id_bucket_64", compute_bucket(64, 7)),)}
    assert len(planned_files) == 2


# The command


def run_buckets_command(client: IndexClient, *arguments: str) -> tuple[int, str]:
    return invoke_seamark("buckets", *arguments, url=client.url)


def test_buckets_command_shows_advises_and_resizes(client: IndexClient) -> None:
    create_upsert_table(client, spec=[("bucket[4]", 1)])
    append(client, "db.t", build_key_rows(list(range(1000))))
    code, text = run_buckets_command(client, "db.t")
    assert (code, "id" in text, "--resize" in text) == (0, True, False), text
    size = int(compute_bucket_sizes(client, "db.t")[0].bytes.sum())
    code, text = run_buckets_command(client, "db.t", "--target-bytes", str(size // 16))
    assert (code, "seamark buckets db.t --resize 16" in text) == (0, True), text
    code, text = run_buckets_command(client, "db.t", "--double")
    assert (code, "id: 8 buckets from now on (partition spec 1)" in text) == (0, True), text
    code, text = run_buckets_command(client, "db.t", "--resize", "8", "--column", "id")
    assert (code, "id: 8 buckets from now on, as before" in text) == (0, True), text
    assert "4 files (" in run_buckets_command(client, "db.t")[1]
    _, text = run_buckets_command(client, "db.t", "--json")
    (report,) = json.loads(text[text.index("\n[\n") :])  # Logs are part of the output.
    assert (report["buckets"], report["advice"], len(report["sizes"]), report["shared-files"]) == (8, 8, 8, 4)
    assert sum(size["rows"] for size in report["sizes"]) == 1000


@pytest.mark.slow
def test_buckets_command_reports_each_error_in_one_line(client: IndexClient) -> None:
    create_upsert_table(client, spec=[("bucket[8]", 1)])
    create_upsert_table(client, "plain")
    cases: list[tuple[tuple[str, ...], int, str]] = [
        (("db.t", "--resize", "4"), 2, "can only grow"),
        (("db.t", "--resize", "10"), 2, "not 8 doubled"),
        (("db.t", "--resize", "0"), 2, "--resize"),
        (("db.t", "--resize", "16", "--double"), 2, "set one of them"),
        (("db.t", "--column", "note"), 2, "buckets of id only"),
        (("db.plain", "--double"), 2, "has no buckets"),
        (("db.nope",), 1, "does not exist"),
        (("t",), 2, "not the name of a table"),
    ]
    for arguments, code, expected in cases:
        actual_code, text = run_buckets_command(client, *arguments)
        assert (actual_code, expected in text) == (code, True), (arguments, text)
        assert "Traceback" not in text, arguments
