"""Tests of the rules by which delete files apply, one rule of the specification each."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from seamark.formats.iceberg.manifests.manifest import ManifestFile
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.runtime.errors import Corrupt
from seamark.metaserver.index.blocks.block import Block
from seamark.metaserver.planner.deletes import equality
from seamark.metaserver.planner.deletes.delete_index import DeleteIndex
from seamark.metaserver.planner.view.view import TableView
from tests.planner.lakes.delete_tables import (
    LATE,
    NESTED,
    SPECS,
    A,
    B,
    F,
    build_manifest_file,
    build_schema,
    build_specs,
    encode_as_block,
    read_positions,
)
from tests.planner.lakes.kinds import DAY_US, to_bytes
from tests.planner.lakes.lake import DATA, EQUALITY_DELETES, PATH_ID, POSITION_DELETES, DataFile, DeleteFile
from tests.planner.lakes.manifests import ADDED, EXISTING, Entry, Style, build_manifest_bytes
from tests.planner.lakes.metrics import ColumnMetrics
from tests.planner.test_deletes import UNITS_PER_DAY, ListedManifest, Situation

KINDS = {A: "long", B: "uuid", NESTED: "int", LATE: "string", F: "double"}
SCHEMA = build_schema(0, KINDS, set(), late=True)
PLAIN_STYLE = Style(has_shuffled_fields=False, sparse=False, codec="null", old_names=False, summaries=False, seed=0)


def build_entry(file: Any, sequence: int | None, status: int = EXISTING) -> Entry:
    return Entry(status, 1, sequence, sequence, file)


def make_common_fields(path: str, content: int, spec_id: int, partition: tuple[Any, ...]) -> dict[str, Any]:
    return {
        "path": path,
        "content": content,
        "format": "PARQUET",
        "spec_id": spec_id,
        "partition": partition,
        "record_count": 1,
        "size": 1,
        "metrics": {},
    }


def build_data_file(
    path: str = "d",
    *,
    spec_id: int = 0,
    partition: tuple[Any, ...] = (),
    metrics: dict[int, ColumnMetrics] | None = None,
) -> DataFile:
    return DataFile(**make_common_fields(path, DATA, spec_id, partition) | {"metrics": metrics or {}})


def build_delete_file(content: int, *, spec_id: int = 0, partition: tuple[Any, ...] = (), **fields: Any) -> DeleteFile:
    return DeleteFile(**make_common_fields("x", content, spec_id, partition) | fields)


def build_vector(referenced_path: str | None = "d", **fields: Any) -> DeleteFile:
    return build_delete_file(
        POSITION_DELETES, referenced_path=referenced_path, format="PUFFIN", content_offset=4, content_size=9, **fields
    )


def build_block(
    entries: list[Entry], *, schema: dict[str, Any] = SCHEMA, version: int = 3, kinds: dict[int, str] = KINDS
) -> Block:
    content, spec_id = int(entries[0].file.content != DATA), entries[0].file.spec_id
    data = build_manifest_bytes(
        entries,
        version=version,
        content=content,
        style=PLAIN_STYLE,
        spec_id=spec_id,
        fields=SPECS[spec_id],
        kinds=kinds,
        schema=schema,
    )
    return encode_as_block("manifest.avro", data)


def find_applying_deletes(
    data: list[Entry], *deletes: list[Entry], sequence: int = 5, schema: dict[str, Any] = SCHEMA
) -> list[tuple[int, ...]]:
    """Return the delete files that apply to each data file. All manifests have the sequence number `sequence`."""

    def list_manifest_files(manifests: list[list[Entry]]) -> list[ManifestFile]:
        return [
            build_manifest_file(int(entries[0].file.content != DATA), entries[0].file.spec_id, sequence)
            for entries in manifests
        ]

    view = TableView(
        list_manifest_files([data]),
        [build_block(data)],
        list_manifest_files(list(deletes)),
        [build_block(delete, schema=schema) for delete in deletes],
    )
    index = DeleteIndex(view, build_specs(), [msgspec.convert(schema, type=Schema)])
    return index.find_deletes(read_positions(view))


def test_position_deletes_apply_to_files_of_their_commit_and_equality_deletes_to_older_files() -> None:
    data = [build_entry(build_data_file(f"d{sequence}"), sequence) for sequence in (3, 4, 5)]
    assert find_applying_deletes(data, [build_entry(build_delete_file(POSITION_DELETES), 4)]) == [(0,), (0,), ()]
    assert find_applying_deletes(data, [build_entry(build_delete_file(EQUALITY_DELETES, equality_ids=[A]), 4)]) == [
        (0,),
        (),
        (),
    ]


def test_added_files_inherit_sequence_numbers_which_are_0_in_version_1() -> None:
    data = [build_entry(build_data_file("added"), None, ADDED), build_entry(build_data_file("kept"), 4)]
    deletes = [build_entry(build_delete_file(EQUALITY_DELETES, equality_ids=[A]), None, ADDED)]
    assert find_applying_deletes(data, deletes) == [(), (0,)]
    old_entries = [build_entry(build_data_file("v1"), None)]
    view = TableView(
        [build_manifest_file(0, 0, 0)],
        [build_block(old_entries, version=1)],
        [build_manifest_file(1, 0, 1)],
        [build_block(deletes)],
    )
    assert DeleteIndex(view, build_specs(), []).find_deletes_for_file(0) == (0,)


def test_existing_file_without_a_sequence_number_is_corrupt() -> None:
    deletes = [build_entry(build_delete_file(POSITION_DELETES), 5)]
    with pytest.raises(Corrupt, match=r"manifest\.avro: the entry of lost has no sequence number"):
        find_applying_deletes([build_entry(build_data_file("lost"), None)], deletes)
    with pytest.raises(Corrupt, match=r"manifest\.avro: the entry of x has no sequence number"):
        find_applying_deletes(
            [build_entry(build_data_file(), 1)], [build_entry(build_delete_file(POSITION_DELETES), None)]
        )


def test_deletion_vector_replaces_position_deletes_but_not_equality_deletes() -> None:
    other_files = [
        build_entry(build_delete_file(POSITION_DELETES), 5),
        build_entry(build_delete_file(POSITION_DELETES, referenced_path="d"), 5),
        build_entry(build_delete_file(EQUALITY_DELETES, equality_ids=[A]), 5),
    ]
    data = [build_entry(build_data_file("d"), 1), build_entry(build_data_file("e"), 1)]
    assert find_applying_deletes(data, other_files, [build_entry(build_vector(), 5)]) == [(2, 3), (0, 2)]


def test_deletion_vector_older_than_its_data_file_is_ignored() -> None:
    assert find_applying_deletes(
        [build_entry(build_data_file(), 3)],
        [build_entry(build_vector(), 2), build_entry(build_delete_file(POSITION_DELETES), 4)],
    ) == [(1,)]


def test_all_deletion_vectors_of_a_data_file_are_kept() -> None:
    assert find_applying_deletes(
        [build_entry(build_data_file(), 3)], [build_entry(build_vector(), 4), build_entry(build_vector(), 5)]
    ) == [(0, 1)]


def test_deletion_vector_without_a_data_file_is_corrupt() -> None:
    with pytest.raises(Corrupt, match=r"manifest\.avro: a deletion vector in x has no referenced_data_file"):
        find_applying_deletes([build_entry(build_data_file(), 3)], [build_entry(build_vector(None), 4)])


def test_data_file_in_a_delete_manifest_is_corrupt() -> None:
    odd_delete = build_delete_file(POSITION_DELETES)
    odd_delete.content = 7
    with pytest.raises(Corrupt, match=r"manifest\.avro lists x, which is not a delete file"):
        find_applying_deletes([build_entry(build_data_file(), 3)], [build_entry(odd_delete, 4)])


def test_position_deletes_apply_by_partition_unless_they_name_their_file() -> None:
    data = [
        build_entry(build_data_file("one", spec_id=1, partition=(1,)), 1),
        build_entry(build_data_file("two", spec_id=1, partition=(2,)), 1),
        build_entry(build_data_file("null", spec_id=1, partition=(None,)), 1),
    ]
    deletes = [
        build_entry(build_delete_file(POSITION_DELETES, spec_id=1, partition=(2,)), 1),
        build_entry(build_delete_file(POSITION_DELETES, spec_id=1, partition=(None,)), 1),
        build_entry(build_delete_file(POSITION_DELETES, spec_id=1, partition=(1,), referenced_path="one"), 1),
    ]
    unpartitioned_entries = [build_entry(build_delete_file(POSITION_DELETES), 1)]
    assert find_applying_deletes(data, deletes, unpartitioned_entries) == [(2,), (0,), (1,)]


def test_float_partitions_are_compared_by_their_bits() -> None:
    values = (0.0, -0.0, math.nan, None)
    data = [build_entry(build_data_file(repr(value), spec_id=2, partition=(1, value)), 1) for value in values]
    deletes = [build_entry(build_delete_file(POSITION_DELETES, spec_id=2, partition=(1, value)), 1) for value in values]
    assert find_applying_deletes(data, deletes) == [(0,), (1,), (2,), (3,)]


def test_equality_deletes_of_a_spec_with_only_void_fields_are_global() -> None:
    data = [build_entry(build_data_file(spec_id=1, partition=(1,)), 1)]
    for spec_id, partition, expected in ((3, (None,), (0,)), (0, (), (0,)), (4, (None, None), ())):
        delete = build_delete_file(EQUALITY_DELETES, spec_id=spec_id, partition=partition, equality_ids=[A])
        assert find_applying_deletes(data, [build_entry(delete, 2)]) == [expected], spec_id


DELETE_WITH_EQUAL_PATH_BOUNDS = build_delete_file(
    POSITION_DELETES, metrics={PATH_ID: ColumnMetrics(lower=b"d", upper=b"d")}
)
DELETE_WITH_DIFFERENT_PATH_BOUNDS = build_delete_file(
    POSITION_DELETES, metrics={PATH_ID: ColumnMetrics(lower=b"d", upper=b"e")}
)


def test_equal_path_bounds_name_the_data_file() -> None:
    data = [build_entry(build_data_file("d"), 1), build_entry(build_data_file("e"), 1)]
    deletes = [build_entry(DELETE_WITH_EQUAL_PATH_BOUNDS, 2), build_entry(DELETE_WITH_DIFFERENT_PATH_BOUNDS, 2)]
    assert find_applying_deletes(data, deletes) == [(0, 1), (1,)]


def build_metrics(
    lower: bytes | None, upper: bytes | None, nulls: int | None = 0, nans: int | None = None
) -> ColumnMetrics:
    return ColumnMetrics(values=2, nulls=nulls, nans=nans, lower=lower, upper=upper)


@pytest.mark.parametrize(
    ("key", "kind", "delete_values", "data_values", "is_kept"),
    [
        pytest.param(A, "long", (1, 5, 0), (6, 9, 0), False, id="apart"),
        pytest.param(A, "long", (1, 6, 0), (6, 9, 0), True, id="touching"),
        pytest.param(A, "long", (1, 5, 1), (6, 9, 1), True, id="null in both"),
        pytest.param(A, "long", (1, 5, None), (6, 9, 1), True, id="null counts of one unknown"),
        pytest.param(A, "long", (1, 5, None), (6, 9, 0), False, id="null in one at most"),
        pytest.param(A, "long", (None, None, 2), (6, 9, 0), False, id="only nulls deleted and none there"),
        pytest.param(A, "long", (1, 5, 0), (None, None, 2), False, id="no nulls deleted and only nulls there"),
        pytest.param(A, "long", (1, 5, 0), (None, None, 0), True, id="bounds unknown"),
        pytest.param(A, "long", (None, 5, 0), (6, None, 0), False, id="half the bounds are enough"),
        pytest.param(F, "double", (1.0, 5.0, 0), (6.0, 9.0, 0), True, id="NaN perhaps in both"),
        pytest.param(NESTED, "int", (1, 5, None), (6, 9, None), True, id="required in a struct that may be null"),
        pytest.param(B, "uuid", (b"\x10", b"\x90"), (b"\xa0", b"\xb0"), False, id="UUIDs apart, as both orders say"),
        pytest.param(B, "uuid", (b"\xa0", b"\x10"), (b"\x20", b"\x30"), True, id="UUIDs in signed order"),
        pytest.param(LATE, "string", ("a", "b", 0), ("ba", "c", 0), False, id="strings apart"),
    ],
)
def test_equality_delete_is_dropped_only_when_statistics_exclude_it(
    key: int, kind: str, delete_values: tuple[Any, ...], data_values: tuple[Any, ...], is_kept: bool
) -> None:
    def build_metrics_of(lower: Any, upper: Any, nulls: int | None = 0) -> dict[int, ColumnMetrics]:
        def write_value(value: Any) -> bytes | None:
            value = value.ljust(16, b"\0") if kind == "uuid" else value
            return None if value is None else to_bytes(kind, value)

        return {key: build_metrics(write_value(lower), write_value(upper), nulls)}

    delete = build_delete_file(EQUALITY_DELETES, equality_ids=[key], metrics=build_metrics_of(*delete_values))
    data = build_data_file(metrics=build_metrics_of(*data_values))
    assert find_applying_deletes([build_entry(data, 1)], [build_entry(delete, 2)]) == [(0,) if is_kept else ()]


@pytest.mark.parametrize("pairs_max", [16, 1 << 21])
def test_many_equality_deletes_apply_to_the_same_files_as_one_by_one(
    pairs_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison of many deletes with many files at once has the same result as the comparison of each pair.

    `pairs_max` limits the pairs that are compared at once.
    """
    monkeypatch.setattr(equality, "_PAIRS_MAX", pairs_max)
    rng = random.Random(pairs_max)
    # The oracle's methods need only these two attributes, so no random view is drawn.
    oracle = Situation.__new__(Situation)
    oracle.__dict__.update({"kinds": {1: KINDS}, "required_ids": set()})

    def build_metrics_of(ids: list[int]) -> dict[int, ColumnMetrics]:
        metrics = {}
        for key in ids:
            low = rng.randrange(200)
            pair = [
                to_bytes("long", value) if key == A else b"%03d" % value for value in (low, low + rng.choice([0, 3]))
            ]
            nulls = rng.choice([0, 0, 0, 0, 1, None, 2])
            # A file has 2 rows. If both are null, the column has no bounds.
            bounds = (None, None) if nulls == 2 or rng.random() < 0.1 else pair
            metrics[key] = build_metrics(*bounds, nulls)  # type: ignore[call-arg]
        return metrics

    def draw_partition() -> dict[str, Any]:
        return {"spec_id": 1, "partition": (rng.choice([1, 2, 2, 2, None]),)}

    data = [
        build_entry(
            build_data_file(f"d{index}", metrics=build_metrics_of([A, LATE]), **draw_partition()), rng.randrange(9)
        )
        for index in range(80)
    ]
    deletes = []
    for count, draw_fields in ((250, draw_partition), (150, dict)):
        files = [(rng.choice([[A], [A], [LATE, A]]), draw_fields()) for _ in range(count)]
        delete_files = [
            build_delete_file(EQUALITY_DELETES, equality_ids=ids, metrics=build_metrics_of(ids), **fields)
            for ids, fields in files
        ]
        deletes.append([build_entry(file, rng.randrange(12)) for file in delete_files])
    applying_deletes = find_applying_deletes(data, *deletes)
    manifest = ListedManifest(0, 0, 0, 3, 5)
    listed_deletes = [(manifest, item) for item in deletes[0] + deletes[1]]
    expected = [
        tuple(
            index
            for index, delete in enumerate(listed_deletes)
            if oracle.is_in_scope(delete, (manifest, item)) and not oracle.is_dropped_by_java(delete, (manifest, item))
        )
        for item in data
    ]
    assert applying_deletes == expected
    assert 1000 < sum(map(len, applying_deletes)) < 20_000


def test_required_column_has_no_nulls_when_null_counts_are_missing() -> None:
    schema = build_schema(0, KINDS, {A}, late=True)
    excluded_metrics, included_metrics = (
        {A: ColumnMetrics(lower=to_bytes("long", low), upper=to_bytes("long", low + 1))} for low in (1, 5)
    )
    delete = build_entry(build_delete_file(EQUALITY_DELETES, equality_ids=[A], metrics=excluded_metrics), 2)
    data = [build_entry(build_data_file(metrics=included_metrics), 1)]
    assert find_applying_deletes(data, [delete]) == [(0,)]
    assert find_applying_deletes(data, [delete], schema=schema) == [()]


def test_bounds_in_a_former_unit_of_time_exclude_no_delete() -> None:
    day, micros = to_bytes("date", 20_000), to_bytes("timestamp", 20_000 * DAY_US)
    data = build_data_file(metrics={A: build_metrics(day, day)})
    delete = build_delete_file(EQUALITY_DELETES, equality_ids=[A], metrics={A: build_metrics(micros, micros)})
    dates, timestamps = (build_schema(0, KINDS | {A: kind}, set(), late=True) for kind in ("date", "timestamp"))
    view = TableView(
        [build_manifest_file(0, 0, 5)],
        [build_block([build_entry(data, 1)], schema=dates)],
        [build_manifest_file(1, 0, 5)],
        [build_block([build_entry(delete, 2)], schema=timestamps)],
    )
    assert DeleteIndex(view, build_specs(), []).find_deletes_for_file(0) == (0,)


@pytest.mark.parametrize("kind", ["timestamp", "timestamp_ns"])
def test_partition_deletes_apply_before_and_after_promotion_of_a_date_to_a_timestamp(kind: str) -> None:
    kinds = [KINDS | {A: item} for item in ("date", kind)]
    schemas = [build_schema(number, kind, set(), late=True) for number, kind in enumerate(kinds)]

    def build_blocks(build_file: Callable[[Any], DataFile | DeleteFile], sequence: int) -> list[Block]:
        """Return a block written before the promotion and a block written after it, with the same three partitions."""
        days = [[-700 * unit, 700 * unit, None] for unit in (1, UNITS_PER_DAY[kind])]
        return [
            build_block([build_entry(build_file((day,)), sequence) for day in day_values], schema=schema, kinds=kind)
            for day_values, schema, kind in zip(days, schemas, kinds, strict=True)
        ]

    data = build_blocks(lambda partition: build_data_file(spec_id=1, partition=partition), 1)
    positions = build_blocks(lambda partition: build_delete_file(POSITION_DELETES, spec_id=1, partition=partition), 1)
    equality_blocks = build_blocks(
        lambda partition: build_delete_file(EQUALITY_DELETES, spec_id=1, partition=partition, equality_ids=[B]), 2
    )
    view = TableView(
        [build_manifest_file(0, 1, 5)] * 2, data, [build_manifest_file(1, 1, 5)] * 4, [*positions, *equality_blocks]
    )
    index = DeleteIndex(view, build_specs(), [msgspec.convert(schema, type=Schema) for schema in schemas])
    assert index.find_deletes(read_positions(view)) == [tuple(range(day, 12, 3)) for day in (0, 1, 2)] * 2


def test_equality_delete_on_a_column_missing_from_the_data_file_is_kept() -> None:
    delete = build_delete_file(EQUALITY_DELETES, equality_ids=[LATE], metrics={LATE: build_metrics(b"a", b"b")})
    assert find_applying_deletes(
        [build_entry(build_data_file(metrics={A: build_metrics(None, None)}), 1)], [build_entry(delete, 2)]
    ) == [(0,)]


def test_statistics_of_two_columns_together_can_exclude_an_equality_delete() -> None:
    lower, upper = to_bytes("long", 1), to_bytes("long", 9)
    delete_metrics = {A: build_metrics(lower, upper), LATE: build_metrics(b"a", b"b")}
    data_metrics = {A: build_metrics(lower, upper), LATE: build_metrics(b"c", b"d")}
    delete = build_delete_file(EQUALITY_DELETES, equality_ids=[LATE, A], metrics=delete_metrics)
    assert find_applying_deletes([build_entry(build_data_file(metrics=data_metrics), 1)], [build_entry(delete, 2)]) == [
        ()
    ]


def test_files_with_the_same_deletes_share_one_tuple() -> None:
    data = [build_entry(build_data_file(str(number)), 1) for number in range(3)]
    deletes = [
        build_entry(build_delete_file(POSITION_DELETES), 2),
        build_entry(build_delete_file(EQUALITY_DELETES, equality_ids=[A]), 2),
    ]
    applying_deletes = find_applying_deletes(data, deletes)
    assert applying_deletes == [(0, 1)] * 3
    assert applying_deletes[0] is applying_deletes[1] is applying_deletes[2]


def test_data_files_are_not_examined_when_there_are_no_delete_files() -> None:
    # The entry has no sequence number, which would be an error if the data file were examined.
    view = TableView(
        [build_manifest_file(DATA, spec_id=0, sequence=5)], [build_block([build_entry(build_data_file(), None)])]
    )
    assert DeleteIndex(view, build_specs(), []).find_deletes(np.zeros(3, dtype=np.int64)) == [(), (), ()]
