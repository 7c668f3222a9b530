"""Tests that generated tables are valid Iceberg tables with right statistics, for fastavro, PyIceberg and Java."""

from __future__ import annotations

import datetime
import io
import json
import struct
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fastavro
import numpy as np
import pytest
from pyiceberg.conversions import from_bytes
from pyiceberg.table import StaticTable
from pyiceberg.transforms import BucketTransform
from pyiceberg.types import LongType, StringType

from bench.planning import ragged
from bench.planning.columns import build_columns
from bench.planning.filters import FILTERS, build_small_filter
from bench.planning.java_peer import run_java_planner
from bench.planning.plans import KeptFiles, PlansDiffer, compute_fingerprint
from bench.planning.pyiceberg_peer import PyIcebergPlanner
from bench.planning.run import BENCHES
from bench.planning.tables import GeneratedTable, generate_table
from tests.services.process import REPO

FILES = 2500
"""Two full manifests and a half, over two days"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("planning")


@pytest.fixture(scope="module")
def generated_table(cache: Path) -> GeneratedTable:
    return generate_table(FILES, cache=cache)


@pytest.fixture(scope="module")
def entries(generated_table: GeneratedTable) -> list[dict[str, Any]]:
    """Return all entries in file order, as fastavro reads them, with maps as dictionaries."""
    found_entries = []
    for path in sorted((generated_table.folder / "metadata").glob("*-m0.avro")):
        with path.open("rb") as file:
            found_entries += [entry["data_file"] for entry in fastavro.reader(file)]
    for entry in found_entries:
        for name, value in entry.items():
            if isinstance(value, list) and value and isinstance(value[0], dict):
                entry[name] = {item["key"]: item["value"] for item in value}
    # The second part of a file name is the number of the file.
    return sorted(found_entries, key=lambda entry: int(entry["file_path"].split("/")[-1].split("-")[1]))


@pytest.mark.parametrize(
    "value", [0, 1, -1, 63, 64, -64, -65, 8191, 8192, 2**31 - 1, -(2**31), 2**62, 2**63 - 1, -(2**63)]
)
def test_varint_has_avros_encoding(value: int) -> None:
    decoded_long = fastavro.schemaless_reader(io.BytesIO(ragged.encode_varint(value)), "long", None)
    assert decoded_long == value


@pytest.mark.parametrize(
    "value", [0, 1, -1, 127, 128, -128, -129, 32767, 32768, 10**9, -(10**9), 2**55, -(2**55), 2**63 - 1]
)
def test_decimal_bound_has_the_fewest_bytes(value: int) -> None:
    cells = ragged.encode_unscaled_decimal(np.array([value], np.int64))
    content = cells.matrix[cells.mask()].tobytes()
    assert int.from_bytes(content, "big", signed=True) == value
    assert len(content) == 1 or not _fits_into_bytes(value, len(content) - 1)


def _fits_into_bytes(value: int, size: int) -> bool:
    return -(1 << (8 * size - 1)) <= value < 1 << (8 * size - 1)


def test_numbers_too_wide_for_their_digits_are_rejected() -> None:
    with pytest.raises(ValueError, match="3 digits"):
        ragged.format_digits(np.array([1000], np.int64), 3)


def test_planners_that_keep_different_files_are_not_compared() -> None:
    plan = KeptFiles(1.0, 2, 100, compute_fingerprint([b"a", b"b"]))
    plan.check_same(KeptFiles(9.0, 2, 100, compute_fingerprint([b"b", b"a"])), "the same in another order")
    with pytest.raises(PlansDiffer, match="some filter"):
        plan.check_same(KeptFiles(1.0, 2, 100, compute_fingerprint([b"a", b"c"])), "some filter")


@pytest.mark.parametrize(("files", "options"), [(0, {}), (10, {"column_count": 3}), (10, {"files_per_day": 100})])
def test_impossible_table_is_rejected(files: int, options: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a generated table needs"):
        generate_table(files, cache=tmp_path, **options)


def test_every_file_has_counts_and_bounds_of_every_column(entries: list[dict[str, Any]]) -> None:
    ids = {column.id for column in build_columns(20)}
    floats = {column.id for column in build_columns(20) if column.type in ("float", "double")}
    (comment,) = (column.id for column in build_columns(20) if column.name == "comment")
    assert len(entries) == FILES
    missing_count = 0
    for entry in entries:
        assert set(entry["column_sizes"]) == set(entry["value_counts"]) == set(entry["null_value_counts"]) == ids
        assert set(entry["nan_value_counts"]) == floats
        assert set(entry["value_counts"].values()) == {entry["record_count"]}
        assert all(0 <= nulls <= entry["record_count"] for nulls in entry["null_value_counts"].values())
        bounded_columns = set(entry["lower_bounds"])
        assert bounded_columns == set(entry["upper_bounds"])
        only_nulls = entry["null_value_counts"][comment] == entry["record_count"]
        assert bounded_columns == (ids - {comment} if only_nulls else ids)
        missing_count += only_nulls
        assert entry["split_offsets"] == list(range(4, entry["file_size_in_bytes"] + 4, 128 << 20))
    assert 0 < missing_count < FILES // 10


def test_lower_bounds_are_not_above_upper_bounds_in_any_type(
    generated_table: GeneratedTable, entries: list[dict[str, Any]]
) -> None:
    schema = StaticTable.from_metadata(generated_table.metadata_location).schema()
    kinds = set()
    for field in schema.fields:
        kinds.add(type(field.field_type).__name__)
        for entry in entries:
            if field.field_id in entry["lower_bounds"]:
                lower = from_bytes(field.field_type, entry["lower_bounds"][field.field_id])
                upper = from_bytes(field.field_type, entry["upper_bounds"][field.field_id])
                assert lower <= upper, (field.name, lower, upper)
                if field.field_type == StringType():
                    assert len(lower) <= 16  # Writers truncate text at this length.
                if isinstance(lower, Decimal):
                    assert abs(lower) < Decimal(10) ** 10
    assert kinds == {
        "LongType", "IntegerType", "DoubleType", "FloatType", "DecimalType", "DateType", "TimestampType",
        "TimestamptzType", "StringType",
    }  # fmt: skip


def test_columns_are_ordered_clustered_or_random_over_the_files(entries: list[dict[str, Any]]) -> None:
    def read_lower_bounds(column: int) -> list[int]:
        return [struct.unpack("<q", entry["lower_bounds"][column])[0] for entry in entries]

    ts, event_id, user_id = read_lower_bounds(1), read_lower_bounds(3), read_lower_bounds(4)
    # 16 files, one for each bucket, have rows of the same time span.
    earliest_times = [min(ts[n : n + 16]) for n in range(0, FILES, 16)]
    assert earliest_times == sorted(earliest_times)
    assert [max(ts[n : n + 16]) for n in range(0, FILES, 16)][:-1] < earliest_times[1:]
    # `event_id` grows from file to file with some disorder, and `user_id` is random in each file.
    order = range(FILES)
    assert 0.9 < np.corrcoef(order, event_id)[0, 1] < 0.999
    assert abs(np.corrcoef(order, user_id)[0, 1]) < 0.1


def test_partitions_paths_and_summaries_agree_with_the_day_column(
    generated_table: GeneratedTable, entries: list[dict[str, Any]]
) -> None:
    assert len({entry["file_path"] for entry in entries}) == FILES
    for entry in entries:
        day, bucket = entry["partition"]["day"], entry["partition"]["user_id_bucket"]
        assert f"/data/day={day.isoformat()}/user_id_bucket={bucket}/" in entry["file_path"]
        (days,) = struct.unpack("<i", entry["lower_bounds"][2])
        assert datetime.date(1970, 1, 1) + datetime.timedelta(days) == day
        (ts,) = struct.unpack("<q", entry["lower_bounds"][1])
        assert ts // 86_400_000_000 == days
        assert 0 <= bucket < 16
    snapshot = StaticTable.from_metadata(generated_table.metadata_location).current_snapshot()
    assert snapshot is not None
    with Path(urlsplit(snapshot.manifest_list).path).open("rb") as file:
        manifests = list(fastavro.reader(file))
    assert [m["added_files_count"] for m in reversed(manifests)] == [1000, 1000, 500]
    assert sum(m["added_rows_count"] for m in manifests) == sum(entry["record_count"] for entry in entries)
    assert sum(m["manifest_length"] for m in manifests) == generated_table.metadata_bytes
    for manifest in manifests:
        path = Path(urlsplit(manifest["manifest_path"]).path)
        assert path.stat().st_size == manifest["manifest_length"]
        with path.open("rb") as file:
            days = [entry["data_file"]["partition"]["day"] for entry in fastavro.reader(file)]
        low, high = (
            struct.unpack("<i", manifest["partitions"][0][bound_name])[0]
            for bound_name in ("lower_bound", "upper_bound")
        )
        assert [low, high] == [(day - datetime.date(1970, 1, 1)).days for day in (min(days), max(days))]


def test_spec_buckets_a_long_like_other_implementations(generated_table: GeneratedTable) -> None:
    spec = StaticTable.from_metadata(generated_table.metadata_location).spec()
    assert [str(field.transform) for field in spec.fields] == ["identity", "bucket[16]"]
    assert BucketTransform(16).transform(LongType())(34) == 3  # The hash is 2017239379 (spec, appendix B).


def test_existing_table_is_reused_unless_it_was_moved(
    generated_table: GeneratedTable, cache: Path, tmp_path: Path
) -> None:
    files_before = {path: path.stat().st_mtime_ns for path in generated_table.folder.rglob("*")}
    steps: list[int] = []
    assert (
        generate_table(FILES, cache=cache, progress=lambda tables_done, table_count: steps.append(tables_done))
        == generated_table
    )
    assert steps == []
    assert {path: path.stat().st_mtime_ns for path in generated_table.folder.rglob("*")} == files_before
    moved_folder = tmp_path / generated_table.folder.name
    moved_folder.mkdir()
    (moved_folder / "made.json").write_text((generated_table.folder / "made.json").read_text())
    second_table = generate_table(FILES, cache=tmp_path, workers=1, progress=lambda done, total: steps.append(done))
    assert steps == [3], "the table has three manifests"
    assert second_table.folder == moved_folder


def test_same_table_has_the_same_statistics_at_any_location(
    generated_table: GeneratedTable, entries: list[dict[str, Any]], tmp_path: Path
) -> None:
    second_table = generate_table(FILES, cache=tmp_path)
    (first_manifest,) = (second_table.folder / "metadata").glob(f"{_find_first_manifest(second_table)}")
    with first_manifest.open("rb") as file:
        for entry, expected in zip(fastavro.reader(file), entries, strict=False):
            actual = {item["key"]: item["value"] for item in entry["data_file"]["lower_bounds"]}
            assert actual == expected["lower_bounds"]
            assert entry["data_file"]["record_count"] == expected["record_count"]


def _find_first_manifest(table: GeneratedTable) -> str:
    metadata_json = json.loads(Path(urlsplit(table.metadata_location).path).read_text())
    with Path(urlsplit(metadata_json["snapshots"][0]["manifest-list"]).path).open("rb") as file:
        return Path(list(fastavro.reader(file))[-1]["manifest_path"]).name


def test_interrupted_generation_of_a_table_leaves_no_file(tmp_path: Path) -> None:
    def interrupt(files_done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate_table(100, cache=tmp_path, workers=1, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_table_with_more_columns_repeats_the_columns_under_new_names(tmp_path: Path) -> None:
    wide_table = generate_table(100, column_count=100, files_per_day=16, cache=tmp_path, workers=1)
    schema = StaticTable.from_metadata(wide_table.metadata_location).schema()
    assert len(schema.fields) == 100
    assert len({field.name for field in schema.fields}) == 100
    assert {field.name for field in schema.fields} >= {"ts", "comment", "event_id_2", "comment_5"}
    plan = PyIcebergPlanner(wide_table.metadata_location).plan({"type": "eq", "term": "day", "value": "2024-01-02"})
    assert plan.file_count == 16


@pytest.mark.slow  # This starts a separate JVM; tests/planner/ also compares both planners with Seamark's.
def test_pyiceberg_and_java_keep_the_same_files_by_every_filter(
    generated_table: GeneratedTable, tmp_path: Path
) -> None:
    pyiceberg_planner = PyIcebergPlanner(generated_table.metadata_location)
    with run_java_planner(generated_table.metadata_location, FILES, tmp_path / "java.log") as java_planner:
        assert java_planner.plan(True).summary == pyiceberg_planner.plan(True).summary
        assert java_planner.plan(True).file_count == FILES
        for bench_filter in FILTERS.values():
            java_files = java_planner.plan(bench_filter.build_expression(generated_table))
            java_files.check_same(
                pyiceberg_planner.plan(bench_filter.build_expression(generated_table)), bench_filter.name
            )
            # Another round number changes the literals of the filter a little, so that no cached plan can answer.
            for plan in (
                java_files,
                java_planner.plan(bench_filter.build_expression(generated_table, round_number=2000)),
            ):
                assert 0 < plan.file_count < FILES, bench_filter.name
        # The small filter must keep a few of the 2,500 files.
        assert 0 < java_planner.plan(build_small_filter(generated_table)).file_count < 20


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHES)
def test_bench_of_planning_prints_its_table(name: str) -> None:
    argv = [sys.executable, "-m", "bench.planning.run", "--quick", name]
    result = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"planning_{name}" in result.stdout
    assert "seamark failed" not in result.stdout


@pytest.mark.slow
def test_unknown_bench_of_planning_is_rejected_with_the_list_of_benches() -> None:
    argv = [sys.executable, "-m", "bench.planning.run", "speed"]
    result = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    message = " ".join(result.stderr.split())
    assert f"no bench speed; there are {', '.join(BENCHES)}" in message
