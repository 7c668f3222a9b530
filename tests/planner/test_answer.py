"""Tests of plan answers: each file once, each value in the specification's form, in pieces that join to valid JSON."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
import numpy as np
import pytest
from pyiceberg.catalog.rest.scan_planning import ScanTasks

from seamark.formats.iceberg.expressions.binding import bind
from seamark.formats.iceberg.expressions.expression import FALSE
from seamark.formats.iceberg.expressions.expression_json import encode_expression, parse_expression
from seamark.formats.iceberg.manifests.manifest import ManifestFile, decode_manifest
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.formats.runtime.errors import Corrupt, NotAcceptable
from seamark.metaserver.index.blocks.block import Block
from seamark.metaserver.index.blocks.encoding import encode_block
from seamark.metaserver.planner.answer.answer import FILES_PER_PIECE, ScanTaskWriter, TaskForm
from seamark.metaserver.planner.answer.content_files import PYICEBERG_DIALECT, STANDARD_DIALECT, choose_dialect
from seamark.metaserver.planner.deletes.delete_index import DeleteIndex
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from seamark.metaserver.planner.view.view import TableView
from tests.planner.lakes.kinds import draw_pool, to_bytes
from tests.planner.lakes.lake import ContentFile, DataFile, DeleteFile
from tests.planner.lakes.manifests import ADDED, Entry, PartitionField, Style, build_manifest_bytes
from tests.planner.lakes.metrics import ColumnMetrics
from tests.planner.lakes.partitioning import infer_result_kind

KINDS = {
    1: "long",
    2: "string",
    3: "date",
    4: "timestamp",
    5: "timestamptz",
    6: "time",
    7: "decimal(9, 2)",
    8: "uuid",
    9: "fixed[4]",
    10: "binary",
    11: "boolean",
    12: "float",
    13: "double",
    14: "int",
}
STYLE = Style(has_shuffled_fields=False, sparse=False, codec="deflate", old_names=False, summaries=False, seed=0)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def build_schema(kinds: dict[int, str] = KINDS) -> dict[str, Any]:
    fields = [{"id": key, "name": f"c{key}", "required": False, "type": kind} for key, kind in kinds.items()]
    return {"type": "struct", "schema-id": 0, "fields": fields}


def build_metadata(*specs: tuple[PartitionField, ...], kinds: dict[int, str] = KINDS) -> TableMetadata:
    metadata_json = {
        "format-version": 2,
        "table-uuid": "9c12d441-03fe-4693-9a96-a0705ddf69c1",
        "location": "file:///t",
        "last-sequence-number": 1,
        "last-updated-ms": 1_700_000_000_000,
        "last-column-id": 99,
        "schemas": [build_schema(kinds)],
        "current-schema-id": 0,
        "partition-specs": [
            {"spec-id": number, "fields": [field.build_json() for field in spec]} for number, spec in enumerate(specs)
        ],
        "default-spec-id": 0,
        "last-partition-id": 1999,
        "sort-orders": [{"order-id": 0, "fields": []}],
        "default-sort-order-id": 0,
    }
    return decode_table(json.dumps(metadata_json).encode(), "file:///t/metadata.json")


def build_block(
    files: list[Any],
    spec_id: int = 0,
    fields: tuple[PartitionField, ...] = (),
    *,
    kinds: dict[int, str] = KINDS,
    version: int = 2,
) -> tuple[ManifestFile, Block]:
    content = 1 if files[0].content else 0
    data = build_manifest_bytes(
        [Entry(ADDED, 1, file.sequence or None, None, file) for file in files],
        version=version,
        content=content,
        style=STYLE,
        spec_id=spec_id,
        fields=fields,
        kinds=kinds,
        schema=build_schema(kinds),
    )
    path = f"file:///t/metadata/{spec_id}-{content}.avro"
    manifest_file = ManifestFile(
        path, len(data), spec_id, content, 1, 1, 1, len(files), 0, 0, 0, 0, 0, None, None, None
    )
    return manifest_file, Block(b"".join(encode_block(decode_manifest(data, path))))


def build_scan(
    table: TableMetadata,
    data: list[tuple[ManifestFile, Block]],
    deletes: list[tuple[ManifestFile, Block]] | None = None,
    where: object = True,
    view: TableView | None = None,
) -> ScanPlan:
    """Return a scan plan that keeps every file, even files that the filter excludes.

    Args:
        data: The data manifests, each with its decoded files.
        deletes: The delete manifests, each with its decoded files.
        where: The filter's JSON.
        view: The decoded files of an earlier plan, which replace `data` and `deletes`.
    """
    deletes = deletes or []
    view = view or TableView(
        [manifest for manifest, _ in data],
        [block for _, block in data],
        [manifest for manifest, _ in deletes],
        [block for _, block in deletes],
    )
    bound = bind(parse_expression(where), table.current_schema, table.schemas, case_sensitive=True)
    return ScanPlan(
        view,
        DeleteIndex(view, table.partition_specs, table.schemas),
        np.concatenate([view.list_block_entry_ids(number) for number in range(len(view.blocks))]),
        schema=table.current_schema,
        bound=bound,
        metadata=table,
        stages=(),
        snapshot_id=1,
        considered_files=view.file_count,
    )


def parse_answer(plan: ScanPlan, **options: Any) -> dict[str, Any]:
    writer = ScanTaskWriter(plan, **options)
    tasks = b"".join(writer.write_tasks(plan.entry_ids))
    return {
        "file-scan-tasks": json.loads(b"[" + tasks + b"]", parse_float=_parse_number),
        "delete-files": json.loads(b"[" + b"".join(writer.write_delete_files()) + b"]"),
    }


def _parse_number(text: str) -> float:
    return float(text)


def build_data_file(path: str = "file:///t/data/a.parquet", partition: tuple[Any, ...] = (), **fields: Any) -> DataFile:
    options = {"content": 0, "format": "PARQUET", "spec_id": 0, "record_count": 7, "size": 1234, "metrics": {}}
    return DataFile(path=path, partition=partition, **{**options, **fields})


def test_file_in_an_answer_has_the_values_of_its_manifest_entry() -> None:
    file = build_data_file(split_offsets=[4, 1_000_000])
    (task,) = parse_answer(build_scan(build_metadata(()), [build_block([file])]))["file-scan-tasks"]
    assert task == {
        "data-file": {
            "spec-id": 0,
            "content": "data",
            "file-path": "file:///t/data/a.parquet",
            "file-format": "parquet",
            "partition": [],
            "file-size-in-bytes": 1234,
            "record-count": 7,
            "sort-order-id": 0,
            "split-offsets": [4, 1_000_000],
        },
        "residual-filter": True,
    }


def test_answer_has_row_ids_and_sequence_numbers_as_files_inherit_them() -> None:
    """A file with its own first row id uses none of the manifest's row ids. The other files use them in order."""
    files = [
        build_data_file("a"),
        build_data_file("b", first_row_id=5),
        build_data_file("c", record_count=10),
        build_data_file("d", sequence=3),
    ]
    manifest, block = build_block(files, version=3)
    for first_row_id, expected in ((100, [100, 5, 107, 117]), (None, [None] * 4)):
        plan = build_scan(
            build_metadata(()),
            [(msgspec.structs.replace(manifest, first_row_id=first_row_id, sequence_number=9), block)],
        )
        for rows in (plan.entry_ids, plan.entry_ids[2:], plan.entry_ids[1:2]):
            writer = ScanTaskWriter(plan, form=TaskForm(sequence_numbers=True))
            tasks = [item["data-file"] for item in json.loads(b"[" + b"".join(writer.write_tasks(rows)) + b"]")]
            assert [task.get("first-row-id") for task in tasks] == [expected[row] for row in rows.tolist()]
            assert [task["data-sequence-number"] for task in tasks] == [(9, 9, 9, 3)[row] for row in rows.tolist()]


def test_answer_omits_residuals_for_clients_that_need_none() -> None:
    plan = build_scan(
        build_metadata(()),
        [build_block([build_data_file("a"), build_data_file("b")])],
        where={"type": "eq", "term": "c1", "value": 4},
    )
    assert all(
        set(file_scan_task) == {"data-file"}
        for file_scan_task in parse_answer(plan, form=TaskForm(residuals=False))["file-scan-tasks"]
    )
    assert all(
        set(file_scan_task) == {"data-file", "residual-filter"}
        for file_scan_task in parse_answer(plan)["file-scan-tasks"]
    )


@pytest.mark.parametrize(
    "name", ['q"uote', "back\\slash", "tab\tand\nline", "größe ✓ 𝄞", "a%2Fb=c d", "\x01\x1f\x7f", "</script>", "'"]
)
def test_any_file_path_can_be_encoded_as_json(name: str) -> None:
    paths = [f"s3://bucket/data/{name}-{number}.parquet" for number in range(3)] + [name, "x" * 3000 + name]
    file_scan_tasks = parse_answer(
        build_scan(build_metadata(()), [build_block([build_data_file(path) for path in paths])])
    )["file-scan-tasks"]
    assert [task["data-file"]["file-path"] for task in file_scan_tasks] == paths


def test_files_of_many_manifests_are_answered_once_and_in_order() -> None:
    """The test also answers parts of the plan, as the pages of an answer do."""
    rng = random.Random(7)
    lengths = [1, 3, FILES_PER_PIECE, 2 * FILES_PER_PIECE + 1, 1]
    paths = [
        [f"f{number}/{rng.getrandbits(rng.choice([8, 64, 200])):x}" for _ in range(n)]
        for number, n in enumerate(lengths)
    ]
    blocks = [build_block([build_data_file(path, record_count=len(path)) for path in part]) for part in paths]
    plan = build_scan(build_metadata(()), blocks)
    paths_by_entry = dict(zip(plan.entry_ids.tolist(), [path for part in paths for path in part], strict=True))
    for rows in (plan.entry_ids, plan.entry_ids[::7], plan.entry_ids[3:-2], plan.entry_ids[:0]):
        tasks = json.loads(b"[" + b"".join(ScanTaskWriter(plan).write_tasks(rows)) + b"]")
        assert [task["data-file"]["file-path"] for task in tasks] == [paths_by_entry[row] for row in rows.tolist()]
        assert [task["data-file"]["record-count"] for task in tasks] == [
            len(paths_by_entry[row]) for row in rows.tolist()
        ]


@pytest.mark.parametrize("longest", [1, 40, 300, 70_000])
def test_each_file_has_its_own_lists_on_every_page(longest: int) -> None:
    """Lists are stored one after another, and a page may begin with any file.

    Sizes of lists need one, two or four bytes.
    """
    rng = random.Random(11)
    sizes = [None, 0, 1, longest, *(rng.choice([None, 0, 1, 2, min(longest, 90)]) for _ in range(200))]
    lists = [None if size is None else [rng.randrange(-5, 1 << 40) for _ in range(size)] for size in sizes]
    plan = build_scan(
        build_metadata(()),
        [build_block([build_data_file(f"f{n}", split_offsets=offsets) for n, offsets in enumerate(lists)])],
    )
    for rows in (plan.entry_ids, plan.entry_ids[::3], plan.entry_ids[150:], plan.entry_ids[4:5]):
        tasks = json.loads(b"[" + b"".join(ScanTaskWriter(plan).write_tasks(rows)) + b"]")
        actual = [task["data-file"].get("split-offsets", []) for task in tasks]
        assert actual == [lists[row] or [] for row in rows.tolist()], "seed 11"


def test_statistics_belong_to_the_requested_files() -> None:
    """Some files have no statistics. The answer has every fifth file, so its positions are not those of the plan."""
    rng = random.Random(5)
    values = [rng.choice([None, rng.randrange(-(1 << 40), 1 << 40)]) for _ in range(60)]
    metrics = [{} if value is None else {1: build_column_metrics("long", value, value + 9)} for value in values]
    plan = build_scan(
        build_metadata(()),
        [build_block([build_data_file(f"f{n}", metrics=metric) for n, metric in enumerate(metrics)])],
    )
    rows = plan.entry_ids[3::5]
    tasks = json.loads(b"[" + b"".join(ScanTaskWriter(plan, stats=[1]).write_tasks(rows)) + b"]")
    for task, row in zip(tasks, rows.tolist(), strict=True):
        actual = {key: task["data-file"].get(key) for key in ("lower-bounds", "upper-bounds", "value-counts")}
        column_metrics = metrics[row].get(1)
        if column_metrics is None:
            assert actual == dict.fromkeys(actual), f"seed 5, row {row}"
        else:
            assert actual["lower-bounds"] == {"keys": [1], "values": [column_metrics.lower.hex().upper()]}, (
                f"seed 5, row {row}"
            )
            assert actual["upper-bounds"] == {"keys": [1], "values": [column_metrics.upper.hex().upper()]}, (
                f"seed 5, row {row}"
            )
            # `build_column_metrics` gives each file 7 values.
            assert actual["value-counts"] == {"keys": [1], "values": [7]}, f"seed 5, row {row}"


def to_json_value(kind: str, value: Any) -> Any:
    """Return the specification's JSON form of a single value.

    The value is within the range of Python's dates. A decimal has two digits after the point.
    """
    if value is None or kind in ("long", "int", "boolean", "string", "float", "double"):
        return value
    if kind == "date":
        return (date(1970, 1, 1) + timedelta(days=value)).isoformat()
    if kind.startswith("timestamp"):
        moment = EPOCH + timedelta(microseconds=value)
        return moment.isoformat() if kind == "timestamptz" else moment.replace(tzinfo=None).isoformat()
    if kind == "time":
        return (EPOCH + timedelta(microseconds=value)).time().isoformat()
    if kind.startswith("decimal"):
        return str(Decimal(value).scaleb(-2))
    return str(UUID(bytes=value)) if kind == "uuid" else value.hex().upper()


def fits_python(kind: str, value: Any) -> bool:
    """Return whether both Python's types and a block, which stores decoded manifests, can represent the value.

    A block stores null as the least long. Python's dates end about 2,000,000 days after the epoch.
    """
    if value == -(2**63):
        return False
    limits = {"date": 2_000_000, "timestamp": 2_000_000 * 86_400_000_000, "timestamptz": 2_000_000 * 86_400_000_000}
    return not (kind in limits and abs(value) > limits[kind]) and not (
        isinstance(value, float) and not math.isfinite(value)
    )


@pytest.mark.parametrize("column", KINDS)
def test_partition_values_have_the_specifications_json_form(column: int) -> None:
    rng, kind = random.Random(column), KINDS[column]
    values: list[Any] = [value for value in draw_pool(rng, kind, 60) if fits_python(kind, value)]
    rng.shuffle(values)
    values = [*values, None, *values]
    spec = (PartitionField(1000, "p", column, "identity"),)
    parsed_answer = parse_answer(
        build_scan(
            build_metadata(spec), [build_block([build_data_file(f"f{n}", (v,)) for n, v in enumerate(values)], 0, spec)]
        )
    )
    partitions = [task["data-file"]["partition"] for task in parsed_answer["file-scan-tasks"]]
    expected = [[to_json_value(kind, value)] for value in values]
    assert [repr(partition) for partition in partitions] == [repr(item) for item in expected], f"seed {column}"


@pytest.mark.parametrize("transform", ["year", "month", "day", "hour", "bucket[8]", "void"])
def test_transform_values_have_the_types_of_iceberg_java(transform: str) -> None:
    value = {"void": None, "day": 19_000}.get(transform, 7)
    for is_sparse in (False, True):
        spec = (PartitionField(1000, "p", 4, transform),)
        style = replace(STYLE, sparse=is_sparse)
        data = build_manifest_bytes(
            [Entry(ADDED, snapshot_id=1, sequence=None, file_sequence=None, file=build_data_file(partition=(value,)))],
            version=2, content=0, style=style, spec_id=0, fields=spec, kinds=KINDS, schema=build_schema(),
        )  # fmt: skip
        manifest, _ = build_block([build_data_file(partition=(value,))], 0, spec)
        plan = build_scan(build_metadata(spec), [(manifest, Block(b"".join(encode_block(decode_manifest(data, "m")))))])
        expected = to_json_value(infer_result_kind(transform, "timestamp"), value)
        assert parse_answer(plan)["file-scan-tasks"][0]["data-file"]["partition"] == [expected]


def test_infinite_partition_values_are_numbers_that_parsers_read_as_infinite() -> None:
    spec = (PartitionField(1000, "p", 13, "identity"),)
    parsed_answer = parse_answer(
        build_scan(
            build_metadata(spec),
            [build_block([build_data_file("a", (math.inf,)), build_data_file("b", (-math.inf,))], 0, spec)],
        )
    )
    assert [task["data-file"]["partition"] for task in parsed_answer["file-scan-tasks"]] == [[math.inf], [-math.inf]]


def test_nan_partition_is_rejected_with_advice() -> None:
    spec = (PartitionField(1000, "p", 13, "identity"),)
    plan = build_scan(build_metadata(spec), [build_block([build_data_file("a", (math.nan,))], 0, spec)])
    with pytest.raises(NotAcceptable, match=r"seamark\.scan-planning-mode"):
        parse_answer(plan)


def test_positive_and_negative_zero_are_two_partitions() -> None:
    spec = (PartitionField(1000, "p", 13, "identity"),)
    plan = build_scan(
        build_metadata(spec), [build_block([build_data_file("a", (0.0,)), build_data_file("b", (-0.0,))], 0, spec)]
    )
    assert b'"partition":[0.0]' in b"".join(ScanTaskWriter(plan).write_tasks(plan.entry_ids))
    assert b'"partition":[-0.0]' in b"".join(ScanTaskWriter(plan).write_tasks(plan.entry_ids))


def test_partition_values_follow_the_order_and_types_of_the_tables_spec() -> None:
    """Java reads partition values by position, with the types of the current schema."""
    old_kinds = {**KINDS, 1: "int", 12: "float"}
    spec = tuple(PartitionField(1000 + n, f"p{n}", column, "identity") for n, column in enumerate((1, 12, 2)))
    manifest, block = build_block(
        [build_data_file(partition=("x", 3, 0.5))], 0, (spec[2], spec[0], spec[1]), kinds=old_kinds
    )
    plan = build_scan(build_metadata(spec), [(manifest, block)])
    assert parse_answer(plan)["file-scan-tasks"][0]["data-file"]["partition"] == [3, 0.5, "x"]


def test_partition_value_of_a_dropped_column_is_null() -> None:
    """Java reads no other value than null."""
    spec = (PartitionField(1000, "a", 1, "identity"), PartitionField(1001, "b", 2, "identity"))
    kept_kinds = {key: kind for key, kind in KINDS.items() if key != 1}
    plan = build_scan(
        build_metadata(spec, kinds=kept_kinds), [build_block([build_data_file(partition=(3, "x"))], 0, spec)]
    )
    assert parse_answer(plan)["file-scan-tasks"][0]["data-file"]["partition"] == [None, "x"]


def test_date_promoted_to_a_timestamp_is_written_as_a_timestamp() -> None:
    spec = (PartitionField(1000, "a", 3, "identity"),)
    plan = build_scan(
        build_metadata(spec, kinds={**KINDS, 3: "timestamp"}), [build_block([build_data_file(partition=(1,))], 0, spec)]
    )
    assert parse_answer(plan)["file-scan-tasks"][0]["data-file"]["partition"] == ["1970-01-02T00:00:00"]


def test_plans_of_a_shared_view_use_their_own_metadata() -> None:
    """Tables that were registered from one metadata file share their decoded files, even after they diverge.

    Answers for different clients also share them, although PyIceberg gets partition values in another form.
    """
    spec = (PartitionField(1000, "a", 3, "identity"),)
    day_metadata = build_metadata(spec)
    promoted_metadata = build_metadata(spec, kinds={**KINDS, 3: "timestamp"})
    plan = build_scan(day_metadata, [build_block([build_data_file(partition=(1,))], 0, spec)])
    promoted_plan = build_scan(promoted_metadata, [], view=plan.view)
    for _ in range(2):
        for shared_plan, dialect, expected in (
            (plan, STANDARD_DIALECT, "1970-01-02"),
            (promoted_plan, STANDARD_DIALECT, "1970-01-02T00:00:00"),
            (plan, PYICEBERG_DIALECT, 1),
            (promoted_plan, PYICEBERG_DIALECT, 86_400_000_000),
        ):
            assert parse_answer(shared_plan, dialect=dialect)["file-scan-tasks"][0]["data-file"]["partition"] == [
                expected
            ]


def test_error_names_the_manifest_with_an_unknown_spec() -> None:
    plan = build_scan(build_metadata(()), [build_block([build_data_file(spec_id=5)], 5)])
    with pytest.raises(Corrupt, match=r"5-0\.avro"):
        parse_answer(plan)


def test_residual_is_the_filter_without_conditions_that_the_partition_decides() -> None:
    spec = (PartitionField(1000, "p", 2, "identity"),)
    filter_json = {
        "type": "and",
        "left": {"type": "eq", "term": "c2", "value": "x"},
        "right": {"type": "gt", "term": "c1", "value": 5},
    }
    files = [build_data_file("a", ("x",)), build_data_file("b", ("y",)), build_data_file("c", (None,))]
    file_scan_tasks = parse_answer(build_scan(build_metadata(spec), [build_block(files, 0, spec)], where=filter_json))[
        "file-scan-tasks"
    ]
    expected_filter = {"type": "gt", "term": "c1", "value": 5}
    assert [(task["data-file"]["file-path"], task["residual-filter"]) for task in file_scan_tasks] == [
        ("a", expected_filter)
    ]


def build_delete(path: str, content: int, **fields: Any) -> DeleteFile:
    options = {"format": "PARQUET", "spec_id": 0, "partition": (), "record_count": 2, "size": 99, "metrics": {}}
    return DeleteFile(path=path, content=content, sequence=9, **{**options, **fields})


def test_delete_files_are_listed_once_and_referenced_by_position() -> None:
    data = [build_data_file(f"f{number}", sequence=3) for number in range(4)] + [build_data_file("newer", sequence=20)]
    deletes = [
        build_delete("positions", 1),
        build_delete("of f2", 1, referenced_path="f2"),
        build_delete("equality", 2, equality_ids=[1, 2]),
    ]
    parsed_answer = parse_answer(build_scan(build_metadata(()), [build_block(data)], [build_block(deletes)]))
    names = [delete_file["file-path"] for delete_file in parsed_answer["delete-files"]]
    assert sorted(names) == ["equality", "of f2", "positions"]
    actual = [
        sorted(names[item] for item in task.get("delete-file-references", []))
        for task in parsed_answer["file-scan-tasks"]
    ]
    both_contents = ["equality", "positions"]
    assert actual == [both_contents, both_contents, ["equality", "of f2", "positions"], both_contents, []]
    by_name = {delete_file["file-path"]: delete_file for delete_file in parsed_answer["delete-files"]}
    assert by_name["equality"]["content"] == "equality-deletes"
    assert by_name["equality"]["equality-ids"] == [1, 2]
    assert by_name["of f2"]["content"] == "position-deletes"
    assert by_name["of f2"]["referenced-data-file"] == "f2"
    assert "delete-file-references" not in parsed_answer["file-scan-tasks"][4]


def test_page_lists_only_the_delete_files_that_it_references() -> None:
    data = [build_data_file("a", sequence=3), build_data_file("b", sequence=3)]
    deletes = [build_delete("of a", 1, referenced_path="a"), build_delete("of b", 1, referenced_path="b")]
    plan = build_scan(build_metadata(()), [build_block(data)], [build_block(deletes)])
    writer = ScanTaskWriter(plan)
    (task,) = json.loads(b"[" + b"".join(writer.write_tasks(plan.entry_ids[1:])) + b"]")
    assert task["delete-file-references"] == [0]
    assert [item["file-path"] for item in json.loads(b"[" + b"".join(writer.write_delete_files()) + b"]")] == ["of b"]
    writer = ScanTaskWriter(build_scan(build_metadata(()), [build_block([build_data_file("c")])]))
    assert list(writer.write_delete_files()) == []


def test_deletion_vectors_have_their_offset_and_size() -> None:
    vector = build_delete(
        "v.puffin", 1, format="PUFFIN", referenced_path="a", content_offset=4, content_size=40, record_count=1
    )
    data = build_block([build_data_file("a", sequence=3)], version=3)
    parsed_answer = parse_answer(build_scan(build_metadata(()), [data], [build_block([vector], version=3)]))
    (delete_file,) = parsed_answer["delete-files"]
    assert delete_file["file-format"] == "puffin"
    assert (delete_file["content-offset"], delete_file["content-size-in-bytes"]) == (4, 40)
    assert delete_file["referenced-data-file"] == "a"


def build_column_metrics(kind: str, lower: Any, upper: Any) -> ColumnMetrics:
    return ColumnMetrics(7, 1, 0 if kind in ("float", "double") else None, to_bytes(kind, lower), to_bytes(kind, upper))


def test_answer_has_statistics_of_the_requested_columns_only() -> None:
    rng = random.Random(3)
    metrics = {}
    for column, kind in KINDS.items():
        lower, *_, upper = (value for value in draw_pool(rng, kind, 20) if value != -(2**63))
        metrics[column] = build_column_metrics(kind, lower, upper)
    bare_file = build_data_file("bare")
    full_file = build_data_file("full", metrics=metrics)
    plan = build_scan(build_metadata(()), [build_block([full_file, bare_file])])
    assert not set(parse_answer(plan)["file-scan-tasks"][0]["data-file"]) & {"lower-bounds", "value-counts"}
    data_file, empty_task = (task["data-file"] for task in parse_answer(plan, stats=[13, 1, 2])["file-scan-tasks"])
    assert data_file["value-counts"] == {"keys": [1, 2, 13], "values": [7, 7, 7]}
    assert data_file["null-value-counts"] == {"keys": [1, 2, 13], "values": [1, 1, 1]}
    assert data_file["nan-value-counts"] == {"keys": [13], "values": [0]}
    assert data_file["column-sizes"] == {"keys": [1, 2, 13], "values": [41, 42, 53]}
    for side in ("lower", "upper"):
        bounds = [getattr(metrics[column], side).hex().upper() for column in (1, 2, 13)]
        assert data_file[f"{side}-bounds"] == {"keys": [1, 2, 13], "values": bounds}
    assert not set(empty_task) & {"lower-bounds", "upper-bounds", "value-counts", "column-sizes"}
    full_task = parse_answer(plan, stats=list(KINDS))["file-scan-tasks"][0]["data-file"]
    for side in ("lower", "upper"):
        bounds = [getattr(metrics[column], side).hex().upper() for column in KINDS]
        assert full_task[f"{side}-bounds"] == {"keys": list(KINDS), "values": bounds}, "seed 3"


def test_pyiceberg_reads_partition_values_as_from_a_manifest_or_the_plan_is_rejected() -> None:
    columns = (3, 4, 6, 2, 1)
    spec = tuple(PartitionField(1000 + n, f"p{n}", column, "identity") for n, column in enumerate(columns))
    files = [build_data_file("a", (19_000, 5, 6, "x", 1)), build_data_file("b", (19_000, None, 6, "x", 1))]
    plan = build_scan(build_metadata(spec), [build_block(files, 0, spec)])
    tasks = parse_answer(plan, dialect=PYICEBERG_DIALECT)["file-scan-tasks"]
    assert tasks[0]["data-file"]["partition"] == [19_000, 5, 6, "x", 1]
    assert "partition" not in tasks[1]["data-file"]
    binary = (PartitionField(1000, "p", 10, "identity"),)
    plan = build_scan(build_metadata(binary), [build_block([build_data_file("a", (b"x",))], 0, binary)])
    assert "partition" not in parse_answer(plan, dialect=PYICEBERG_DIALECT)["file-scan-tasks"][0]["data-file"]


def test_pyiceberg_parses_every_answer() -> None:
    rng = random.Random(11)
    spec = tuple(PartitionField(1000 + n, f"p{n}", column, "identity") for n, column in enumerate(KINDS))
    pools = {column: [v for v in draw_pool(rng, kind, 9) if fits_python(kind, v)] for column, kind in KINDS.items()}
    files: list[ContentFile] = [
        build_data_file(f"f{n}", tuple(rng.choice([*pools[column], None]) for column in KINDS), sequence=3)
        for n in range(40)
    ]
    filter_json = {
        "type": "or",
        "left": {"type": "starts-with", "term": "c2", "value": "a"},
        "right": {"type": "is-null", "term": "c1"},
    }
    plan = build_scan(build_metadata(spec), [build_block(files, 0, spec)], where=filter_json)
    answer = parse_answer(plan, stats=[1, 2], dialect=PYICEBERG_DIALECT)
    parsed_tasks = ScanTasks.model_validate_json(json.dumps(answer))
    paths = [
        file.path
        for file, row in zip(files, plan.entry_ids.tolist(), strict=True)
        if plan.compute_residual(row) != FALSE
    ]
    assert paths
    assert [task.data_file.file_path for task in parsed_tasks.file_scan_tasks] == paths


def test_only_pyiceberg_receives_the_pyiceberg_form() -> None:
    assert choose_dialect("PyIceberg/0.12.0") is PYICEBERG_DIALECT
    for other_agent in ("", "DuckDB/1.5", "a PyIceberg/0.12.0"):
        assert choose_dialect(other_agent) is STANDARD_DIALECT


def test_residual_uses_the_partition_fields_in_the_manifests_order() -> None:
    """A manifest has its own list of partition fields. Their order or types may differ from the table's spec."""

    def build_plan(
        table: TableMetadata, partition: tuple[Any, ...], *fields: PartitionField, kinds: Any, where: Any
    ) -> ScanPlan:
        file = DataFile(
            "f", content=0, format="PARQUET", spec_id=0, partition=partition, record_count=1, size=1, metrics={}
        )
        return build_scan(table, [build_block([file], 0, fields, kinds=kinds)], where=where)

    field_a, field_b = PartitionField(1000, "a", 1, "identity"), PartitionField(1001, "b", 2, "identity")
    kinds = {1: "int", 2: "int"}
    table = build_metadata((field_a, field_b), kinds=kinds)
    filter_json = {"type": "gt", "term": "c1", "value": 5}
    # In this manifest, field b precedes field a, so the file has b = 9 and a = 1.
    swapped_plan = build_plan(table, (9, 1), field_b, field_a, kinds=kinds, where=filter_json)
    row = int(swapped_plan.entry_ids[0])
    assert swapped_plan.view.locate(row)[0].partition_fields == ((1001, "int"), (1000, "int"))
    assert encode_expression(swapped_plan.compute_residual(row)) is False
    # This manifest lacks field a, so the partition does not decide the filter.
    plan_without_field = build_plan(table, (9,), field_b, kinds=kinds, where=filter_json)
    assert encode_expression(plan_without_field.compute_residual(int(plan_without_field.entry_ids[0]))) == filter_json

    # This manifest was written before the column became a timestamp. Its partition values are days, so they decide
    # nothing.
    promoted_metadata = build_metadata((field_a,), kinds={1: "timestamp"})
    filter_json = {"type": "lt", "term": "c1", "value": "1970-01-02T00:00:00"}
    day_plan = build_plan(promoted_metadata, (20_000,), field_a, kinds={1: "date"}, where=filter_json)
    assert day_plan.compute_residual(int(day_plan.entry_ids[0])) == day_plan.bound
