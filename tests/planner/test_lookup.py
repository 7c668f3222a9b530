"""Lookups on random tables, compared with the known contents of each file; compiled functions compared with loops."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from seamark.formats.iceberg.manifests.manifest import decode_manifest, decode_manifest_list
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.partition import PartitionSpec
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.index.packing import MISSING, Form, decode_value
from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.index.blocks.block import Block
from seamark.metaserver.index.blocks.encoding import encode_block
from seamark.metaserver.objects.router import open_objects
from seamark.metaserver.planner.lookup import _lookup
from seamark.metaserver.planner.lookup.lookup import (
    FoundFiles,
    RequestedColumn,
    Strings,
    find_files_at,
    find_files_by_prefix,
)
from seamark.metaserver.planner.lookup.partitions import group_by_partition
from seamark.metaserver.planner.lookup.prefix import parse_prefix
from seamark.metaserver.planner.plan.planner import Planner, open_planner
from seamark.metaserver.planner.scan.request import ScanRequest
from seamark.metaserver.planner.view.view import TableView
from seamark.metaserver.settings.settings import Settings
from tests.planner.lakes import partitioning
from tests.planner.lakes.history import write_random_lake
from tests.planner.lakes.kinds import FLOATS
from tests.planner.lakes.lake import DATA, ContentFile, DataFile, Lake, LakeSnapshot
from tests.planner.lakes.literal_forms import render
from tests.planner.lakes.manifests import (
    ADDED,
    DELETED,
    EXISTING,
    Entry,
    Manifest,
    PartitionField,
    Style,
    build_manifest_bytes,
    encode_manifest_list,
)
from tests.seeds import examples


@asynccontextmanager
async def open_lookup_planner(folder: Path) -> AsyncIterator[Planner]:
    settings = Settings(home=folder / "home", warehouse=folder.as_uri(), plan_disk_bytes=0)
    clock = SystemClock()
    async with open_objects(settings, clock) as objects, open_planner(settings, objects, clock) as planner:
        yield planner


async def build_views(lake: Lake, planner: Planner) -> list[tuple[TableMetadata, LakeSnapshot, TableView]]:
    """Return (metadata of the table, snapshot, the planner's view of the snapshot's files) for each snapshot."""
    metadata = decode_table(Path(lake.metadata_location.removeprefix("file://")).read_bytes(), lake.metadata_location)
    views = []
    for snapshot in lake.snapshots.values():
        view = await planner.view(metadata, ScanRequest(snapshot_id=snapshot.id))
        views.append((metadata, snapshot, view))
    return views


def list_paths(found_files: FoundFiles) -> list[str]:
    return [(path or b"").decode() for path in found_files.read_texts("file_path").list_values()]


# Prefixes


def is_equal(left: Any, right: Any) -> bool:
    """Return whether two partition values are equal; NaN equals NaN."""
    if isinstance(left, float) and isinstance(right, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    return left is right if left is None or right is None else left == right


def draw_partition_values(rng: random.Random, lake: Lake, files: Sequence[ContentFile]) -> dict[str, Any]:
    """Return about 60 % of the partition fields of a random file by name.

    A third of the values come from another file, so that often no file has all of the values.
    """
    file = rng.choice(files)
    fields = lake.specs[file.spec_id]
    positions = [index for index in range(len(fields)) if rng.random() < 0.6]
    other_file = rng.choice([item for item in files if item.spec_id == file.spec_id])
    return {fields[index].name: rng.choice([file, file, other_file]).partition[index] for index in positions}


def find_files_of_partition(lake: Lake, expected: dict[str, Any], files: Sequence[ContentFile]) -> list[str]:
    ids = {
        name: {part.id for fields in lake.specs.values() for part in fields if part.name == name} for name in expected
    }
    paths = []
    for file in files:
        fields = lake.specs[file.spec_id]
        positions = {
            name: next((index for index, part in enumerate(fields) if part.id in ids[name]), None) for name in expected
        }
        if all(
            positions[name] is not None and is_equal(file.partition[positions[name] or 0], value)
            for name, value in expected.items()
        ):
            paths.append(file.path)
    return paths


def format_partition_values(lake: Lake, partition_values: dict[str, Any]) -> str:
    """Return the values as JSON in the specification's form."""
    json_values: dict[str, Any] = {}
    for name, value in partition_values.items():
        part = next(field for fields in lake.specs.values() for field in fields if field.name == name)
        kind = partitioning.infer_result_kind(part.transform, lake.all_columns[part.source].kind)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            json_values[name] = None if value is None else "NaN"
        else:
            json_values[name] = render(kind, value, "spec")
    return json.dumps(json_values)


async def check_prefixes(seed: int, folder: Path, planner: Planner, counts: Counter[str]) -> None:
    lake = write_random_lake(seed, folder / str(seed))
    rng = random.Random(~seed)
    for metadata, snapshot, view in await build_views(lake, planner):
        for files, file_view in (
            (snapshot.data_files, view),
            (snapshot.delete_files, TableView(view.delete_manifests, view.delete_blocks)),
        ):
            assert list_paths(find_files_by_prefix(file_view)) == [file.path for file in files], f"seed {seed}"
            for _ in range(6 if files else 0):
                partition_values = draw_partition_values(rng, lake, files)
                partition_json = format_partition_values(lake, partition_values)
                context = f"seed {seed}, snapshot {snapshot.id}, partition {partition_json}, {partition_values}"
                lookup_result = find_files_by_prefix(file_view, parse_prefix(partition_json, metadata))
                assert list_paths(lookup_result) == find_files_of_partition(lake, partition_values, files), context
                assert list_paths(find_files_at(file_view, lookup_result.list_entry_ids())) == list_paths(
                    lookup_result
                ), context
                counts["prefixes"] += 1
                counts["narrowing"] += 0 < lookup_result.file_count < len(files)


async def test_partition_prefix_finds_exactly_the_files_of_its_partitions(tmp_path: Path) -> None:
    outcomes, count = Counter[str](), examples(60, 6)
    async with open_lookup_planner(tmp_path) as planner:
        for seed in range(count):
            await check_prefixes(seed, tmp_path, planner, outcomes)
    assert outcomes["prefixes"] > 8 * count
    assert outcomes["narrowing"] > 1.5 * count


@pytest.mark.slow
async def test_partition_prefixes_find_their_files_in_many_random_tables(tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    async with open_lookup_planner(tmp_path) as planner:
        for seed in range(1000, 1600):
            await check_prefixes(seed, tmp_path, planner, counts)


# Columns


def read_bound(kind: str, bounds: Any, row: int) -> Any:
    """Return one bound from the array that contains it, or None if the bound is missing."""
    if isinstance(bounds, Strings):
        raw = bounds.list_values()[row]
        return None if raw is None else decode_value(Form.STRINGS, kind, raw)
    bound = bounds[row].item()
    if isinstance(bound, float):
        return None if math.isnan(bound) else bound
    return None if bound == MISSING else decode_value(Form.INTEGERS, kind, bound)


async def check_statistics(seed: int, folder: Path, planner: Planner, outcomes: Counter[str]) -> None:
    """Compare the result of a lookup, file by file, with the lake.

    Its bounds are compared with the blocks. The tests in tests/index/ compare blocks with manifests.
    """
    lake = write_random_lake(seed, folder / str(seed))
    for _, snapshot, view in await build_views(lake, planner):
        lookup_result = find_files_by_prefix(view)
        files = snapshot.data_files
        assert lookup_result.read_longs("record_count").tolist() == [file.record_count for file in files]
        assert lookup_result.read_longs("file_size_in_bytes").tolist() == [file.size for file in files]
        assert lookup_result.read_sequence_numbers().tolist() == [file.sequence for file in files]
        assert lookup_result.read_snapshot_ids().tolist() == [file.snapshot_id for file in files]
        for column in lake.schema.leaves().values():
            stats = lookup_result.find_statistics(RequestedColumn(column.id, column.kind))
            counts = [stats.counts(name).tolist() for name in ("value_counts", "null_value_counts", "nan_value_counts")]
            bounds_by_side = {side: stats.read_bounds(side) for side in ("lower", "upper")}
            for file_number, file in enumerate(files):
                metrics = file.metrics.get(column.id)
                context = f"seed {seed}, snapshot {snapshot.id}, {column.name}: {file.path}"
                expected = [None] * 3 if metrics is None else [metrics.values, metrics.nulls, metrics.nans]
                assert [
                    None if count[file_number] == MISSING else count[file_number] for count in counts
                ] == expected, context
                block, row = view.locate(int(lookup_result.list_entry_ids()[file_number]))
                for side, bounds in bounds_by_side.items():
                    bound = block.get_bound(side, column.id, row)
                    assert is_equal(read_bound(column.kind, bounds, file_number), bound), f"{context}: {side}"
                    outcomes[f"{column.kind.partition('(')[0].partition('[')[0]} bounds"] += bound is not None


async def test_file_statistics_equal_those_of_the_manifests(tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    async with open_lookup_planner(tmp_path) as planner:
        for seed in range(100, 100 + examples(60, 10)):
            await check_statistics(seed, tmp_path, planner, counts)
    for kind in ("boolean", "int", "long", "date", "time", "timestamp", "string", "uuid", "fixed", "decimal", *FLOATS):
        assert counts[f"{kind} bounds"] > 0, kind


async def test_slice_of_a_lookup_result_equals_the_slice_of_its_columns(tmp_path: Path) -> None:
    async with open_lookup_planner(tmp_path) as planner:
        for seed in range(10):
            lake = write_random_lake(seed, tmp_path / str(seed))
            rng = random.Random(seed)
            for _, _, view in await build_views(lake, planner):
                all_results = find_files_by_prefix(view)
                picked_numbers = np.flatnonzero([rng.random() < 0.6 for _ in range(all_results.file_count)])
                files = find_files_at(view, all_results.list_entry_ids()[picked_numbers])
                assert list_paths(files) == [list_paths(all_results)[index] for index in picked_numbers]
                start, end = sorted(rng.randint(0, files.file_count + 2) for _ in range(2))
                assert list_paths(files.slice_files(start, end)) == list_paths(files)[start:end]
                assert (
                    files.slice_files(start, end).list_entry_ids().tolist()
                    == files.list_entry_ids()[start:end].tolist()
                )


async def test_partition_totals_equal_the_sums_over_their_files(tmp_path: Path) -> None:
    async with open_lookup_planner(tmp_path) as planner:
        for seed in range(200, 200 + examples(40, 3)):
            lake = write_random_lake(seed, tmp_path / str(seed))
            for _, snapshot, view in await build_views(lake, planner):
                lookup_result = find_files_by_prefix(view)
                files_by_partition = group_by_partition(lookup_result)
                records: dict[tuple[object, ...], int] = {}
                for file in snapshot.data_files:
                    records[file.partition_key] = records.get(file.partition_key, 0) + file.record_count
                assert files_by_partition.sum_values(lookup_result.read_longs("record_count")) == list(
                    records.values()
                ), f"seed {seed}"
                assert [partition.spec_id for partition in files_by_partition.partitions] == [key[0] for key in records]


# Partitions as they were before their columns changed


def build_view(folder: Path, manifest_values: Sequence[tuple[str, Sequence[Any]]]) -> TableView:
    """Return the decoded manifests of a table, as the planner uses them. The table is partitioned by column 1.

    Args:
        folder: The folder to which the manifests are written.
        manifest_values: For each manifest, the type of the column when the manifest was written, and the
            partition value of each file.
    """
    style = Style(has_shuffled_fields=False, sparse=False, codec="null", old_names=False, summaries=False, seed=0)
    manifests, blocks = [], []
    for number, (kind, values) in enumerate(manifest_values):
        fields = (PartitionField(1000, "p", 1, "identity"),)
        files = [
            DataFile(
                f"{number}-{index}", DATA, "PARQUET", spec_id=0, partition=(value,), record_count=1, size=1, metrics={}
            )
            for index, value in enumerate(values)
        ]
        schema = {"type": "struct", "schema-id": 0, "fields": [{"id": 1, "name": "c", "required": False, "type": kind}]}
        data = build_manifest_bytes(
            [Entry(ADDED, snapshot_id=1, sequence=1, file_sequence=1, file=file) for file in files],
            version=2,
            content=0,
            style=style,
            spec_id=0,
            fields=fields,
            kinds={1: kind},
            schema=schema,
        )
        path = folder / f"{number}.avro"
        path.write_bytes(data)
        blocks.append(Block(b"".join(encode_block(decode_manifest(data, path.as_uri())))))
        counts = dict.fromkeys((ADDED, EXISTING, DELETED), (0, 0))
        manifest = Manifest(
            path.as_uri(), len(data), content=DATA, spec_id=0, sequence=1, min_sequence=1, snapshot_id=1, entries=[],
            partitions=None, counts=counts,
        )  # fmt: skip
        manifests.append(manifest)
    manifest_list = encode_manifest_list(
        [(manifest, None) for manifest in manifests], version=2, style=style, header={"format-version": "2"}
    )
    return TableView(decode_manifest_list(manifest_list, "file:///list"), blocks)


def build_metadata_of_one_column(metadata: TableMetadata, kind: str) -> TableMetadata:
    """Return metadata of a table with one column of this type. The table is partitioned by the column."""
    schema = msgspec.convert(
        {"type": "struct", "schema-id": 0, "fields": [{"id": 1, "name": "c", "required": False, "type": kind}]},
        type=Schema,
    )
    fields = [{"name": "p", "transform": "identity", "source-id": 1, "field-id": 1000}]
    spec = msgspec.convert({"spec-id": 0, "fields": fields}, type=PartitionSpec)
    return msgspec.structs.replace(metadata, schemas=(schema,), partition_specs=(spec,))


DAY = 19_723
"""2024-01-01"""


@pytest.mark.each_value
@pytest.mark.parametrize("days", [[0, 0], [0, DAY], [DAY, None], [DAY, DAY], [None, None]])
@pytest.mark.parametrize("wanted_day", [0, DAY, None])
def test_date_promoted_to_a_timestamp_is_found_by_its_midnight(
    metadata: TableMetadata, tmp_path: Path, days: list[int | None], wanted_day: int | None
) -> None:
    day_us = 86_400_000_000
    times = [None if day is None else day * day_us for day in [*days, DAY]]
    view = build_view(tmp_path, [("date", days), ("timestamp", times), ("timestamp", [DAY * day_us + 1])])
    partition_json = json.dumps({"p": None if wanted_day is None else wanted_day * day_us})
    lookup_result = find_files_by_prefix(
        view, parse_prefix(partition_json, build_metadata_of_one_column(metadata, "timestamp"))
    )
    expected = [f"0-{index}" for index, day in enumerate(days) if day == wanted_day]
    expected += [f"1-{index}" for index, day in enumerate([*days, DAY]) if day == wanted_day]
    assert list_paths(lookup_result) == expected
    values = [
        group_by_partition(lookup_result).partitions[number].fields[0].value
        for number in group_by_partition(lookup_result).numbers.tolist()
    ]
    assert set(values) <= {wanted_day, None if wanted_day is None else wanted_day * day_us}


@pytest.mark.parametrize(
    ("kinds", "values"),
    [
        (("int", "long"), (7, 7)),
        (("decimal(9, 2)", "decimal(20, 2)"), (725, 725)),
        (("decimal(20, 2)", "decimal(38, 2)"), (-725, -725)),
        (("float", "double"), (0.5, 0.5)),
    ],
)
def test_promoted_partition_value_equals_the_original_value(
    metadata: TableMetadata, tmp_path: Path, kinds: tuple[str, str], values: tuple[Any, Any]
) -> None:
    other_value = values[0] + 3
    view = build_view(
        tmp_path, [(kinds[0], [values[0], other_value, None]), (kinds[1], [None, values[1], other_value])]
    )
    partition_json = json.dumps({"p": render(kinds[1], values[1], "spec")})
    lookup_result = find_files_by_prefix(
        view, parse_prefix(partition_json, build_metadata_of_one_column(metadata, kinds[1]))
    )
    assert list_paths(lookup_result) == ["0-0", "1-1"]


# Invalid prefixes


@pytest.fixture
def metadata(tmp_path: Path) -> TableMetadata:
    """Return metadata with two partition specs.

    The first has identities, a bucket and all time transforms; the second has no bucket.
    """
    fields = [
        (1, "day", "date"),
        (2, "id", "long"),
        (3, "ts", "timestamp"),
        (4, "name", "string"),
        (5, "raw", "binary"),
        (6, "p", "decimal(9, 2)"),
        (7, "d", "double"),
    ]
    parts = [
        (1000, "day", 1, "identity"),
        (1001, "bucket", 2, "bucket[16]"),
        (1002, "year", 3, "year"),
        (1003, "month", 3, "month"),
        (1004, "hour", 3, "hour"),
        (1005, "name", 4, "identity"),
        (1006, "raw", 5, "identity"),
        (1007, "p", 6, "identity"),
        (1008, "d", 7, "identity"),
    ]
    specs = [
        [
            {"field-id": field_id, "name": name, "source-id": source_id, "transform": transform}
            for field_id, name, source_id, transform in spec_parts
        ]
        for spec_parts in (parts, [part for part in parts if part[1] != "bucket"])
    ]
    metadata_json = {
        "format-version": 2,
        "table-uuid": "9c12d441-03fe-4693-9a96-a0705ddf69c1",
        "location": "file:///t",
        "last-updated-ms": 0,
        "last-column-id": 7,
        "last-sequence-number": 0,
        "schemas": [
            {
                "type": "struct",
                "schema-id": 0,
                "fields": [{"id": key, "name": name, "type": kind, "required": False} for key, name, kind in fields],
            }
        ],
        "current-schema-id": 0,
        "partition-specs": [{"spec-id": index, "fields": spec} for index, spec in enumerate(specs)],
        "default-spec-id": 0,
        "last-partition-id": 1008,
        "sort-orders": [{"order-id": 0, "fields": []}],
        "default-sort-order-id": 0,
    }
    return decode_table(json.dumps(metadata_json).encode(), "file:///t/metadata.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dya=2024-01-01", "the table's partition fields are bucket, d, day"),
        ("day", "name=value"),
        ("day=2024-01-01/day=2024-01-02", "twice"),
        ("day=yesterday", "partition field day"),
        ("bucket=x", "partition field bucket"),
        ("month=2024", "like 2024-01"),
        ("month=2024-13", "not a valid month"),
        ("hour=2024-01-01", "like 2024-01-01-05"),
        ("hour=2024-01-01-24", "not a valid hour"),
        ("hour=2024-02-30-01", "partition field hour"),
        ("year=MMXXIV", "like 2024"),
        ("raw=00ff0", "base64"),
        ('{"day": [1]}', "partition field day"),
        ('{"day"', "not valid JSON"),
        ('{"raw": "xyz"}', "partition field raw"),
        ("day=" + "1" * 20_000, "characters"),
    ],
)
def test_invalid_prefix_is_rejected_with_the_reason(metadata: TableMetadata, text: str, message: str) -> None:
    with pytest.raises(BadRequest) as error:
        parse_prefix(text, metadata)
    assert message in error.value.message


@pytest.mark.parametrize(
    ("path", "as_json"),
    [
        ("day=2024-01-01", '{"day": "2024-01-01"}'),
        ("day=2024-01-01/bucket=3", '{"day": 19723, "bucket": 3}'),
        ("year=2024", '{"year": 54}'),
        ("month=2024-02", '{"month": 649}'),
        ("hour=1970-01-02-05", '{"hour": 29}'),
        ("name=a%2Fb%3D+c", '{"name": "a/b=+c"}'),
        ("name=null", '{"name": null}'),
        ("name=__HIVE_DEFAULT_PARTITION__/", '{"name": null}'),
        ("raw=AP8%3D", '{"raw": "00FF"}'),
        ("p=1.50", '{"p": "1.5"}'),
        ("d=NaN", '{"d": "NaN"}'),
        ("d=1", '{"d": 1.0}'),
        ("", "{}"),
    ],
)
def test_path_form_and_json_form_of_a_prefix_are_equivalent(metadata: TableMetadata, path: str, as_json: str) -> None:
    assert parse_prefix(path, metadata) == parse_prefix(as_json, metadata)


def test_prefix_in_json_distinguishes_the_text_null_from_null(metadata: TableMetadata) -> None:
    assert parse_prefix('{"name": "null"}', metadata) != parse_prefix('{"name": null}', metadata)


# The compiled functions

LAYOUT_COLUMNS = 15
ROW_COUNT_COLUMN = 4
"""The column of a layout with the number of rows of each block, as in view.py"""


def test_compiled_functions_reject_rows_outside_a_block() -> None:
    layout = np.zeros((1, LAYOUT_COLUMNS), dtype=np.int64)
    layout[0, ROW_COUNT_COLUMN] = 5
    no_picks: Any = np.empty(0, dtype=np.int64)

    def read_longs(layout: Any, segments: Any, picks: Any) -> Any:
        return _lookup.read_longs((layout,), segments, picks)

    def write_integers(layout: Any, segments: Any, picks: Any) -> Any:
        rows = max(0, int(segments[0, 2]))
        return _lookup.write_integers(layout, segments, picks, np.zeros(rows * 8, np.uint8), 8, np.zeros(0, np.uint8))

    for compiled_function in (
        read_longs,
        write_integers,
        _lookup.list_entry_ids,
        _lookup.read_doubles,
        _lookup.read_strings,
    ):
        for segment in ([1, 0, 1, -1], [0, 3, 3, -1], [0, -1, 2, -1], [0, 0, 1, 0], [0, 0, -1, -1]):
            with pytest.raises(IndexError):
                compiled_function(layout, np.array([segment], dtype=np.int64), no_picks)
        with pytest.raises(IndexError):
            compiled_function(layout, np.array([[0, 0, 1, 0]], dtype=np.int64), np.array([5], dtype=np.int64))


def test_compiled_function_writes_integers_only_within_the_buffer() -> None:
    layout = np.zeros((1, LAYOUT_COLUMNS), dtype=np.int64)
    layout[0, ROW_COUNT_COLUMN] = 20
    # A segment is the block, the first row, the number of rows, and -1 because the rows are not listed in `picks`.
    segments: Any = np.array([[0, 0, 20, -1]], dtype=np.int64)
    picks: Any = np.empty(0, dtype=np.int64)
    # 20 rows need 160 bytes as longs or 80 as ints, and 3 bytes of validity bits, if there are any.
    for size, width, bits in ((159, 8, 0), (161, 8, 0), (80, 8, 0), (80, 2, 0), (80, 4, 2)):
        with pytest.raises(ValueError):
            _lookup.write_integers(layout, segments, picks, np.zeros(size, np.uint8), width, np.zeros(bits, np.uint8))
    validity_bits: Any = np.zeros(3, np.uint8)
    assert _lookup.write_integers(layout, segments, picks, np.zeros(80, np.uint8), 4, validity_bits) == 0
    assert validity_bits.tolist() == [255, 255, 15]
