"""Tests of the partitions of rows, compared with the transforms of single values and with PyIceberg."""

from __future__ import annotations

import random
from typing import Any

import mmh3
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg.transforms import parse_transform
from pyiceberg.types import IcebergType

from seamark.connector.arrow.casting import Unwritable, build_arrow_schema, conform
from seamark.connector.arrow.partitions import Partitioner, apply_transform
from seamark.formats.iceberg.metadata.partition import PartitionField, PartitionSpec
from seamark.formats.iceberg.types.schema import Field, Schema, StructType
from seamark.formats.iceberg.types.transforms import accepts_type, compute_transform
from seamark.formats.index.kernels import _murmur
from tests.connector.read import typed
from tests.seeds import examples

TRANSFORMS = [
    *("identity", "void", "year", "month", "day", "hour"),
    *("bucket[1]", "bucket[7]", "bucket[2147483647]", "truncate[1]", "truncate[10]", "truncate[1000]"),
]
PAIRS = [(transform, kind) for kind in typed.SAMPLES for transform in TRANSFORMS if accepts_type(transform, kind)]


def compute_partition_values(transform: str, kind: str, column: pa.Array | pa.ChunkedArray) -> list[Any]:
    result = apply_transform(transform, kind, column)
    return [result.values[code] for code in result.codes.tolist()]


@pytest.mark.few_cases(60)
@pytest.mark.parametrize(("transform", "kind"), PAIRS)
def test_transform_of_a_column_equals_the_transform_of_each_value(transform: str, kind: str) -> None:
    @settings(max_examples=examples(25), suppress_health_check=[HealthCheck.too_slow])
    @given(typed.draw_columns(kind), st.integers(0, 40))
    def check_transform(values: list[Any], split: int) -> None:
        parts = [typed.build_array(kind, part) for part in (values[:split], values[split:])]
        expected = [compute_transform(transform, kind, value) for value in values]
        assert typed.are_all_same(compute_partition_values(transform, kind, pa.chunked_array(parts)), expected)

    check_transform()


@pytest.mark.few_cases(40)
@pytest.mark.parametrize(
    ("transform", "kind"),
    [(transform, kind) for transform, kind in PAIRS if not kind.startswith(("float", "decimal", "uuid"))],
)
def test_pyiceberg_computes_the_same_partition_values(transform: str, kind: str) -> None:
    """Types for which PyIceberg uses its own objects are left out; `test_transforms.py` compares their functions."""
    iceberg_type: IcebergType = IcebergType.handle_primitive_type(kind, lambda name: name)
    transform_function = parse_transform(transform).transform(iceberg_type)
    values = typed.draw_column(random.Random(7), kind, 60)
    partition_values = compute_partition_values(transform, kind, typed.build_array(kind, values))
    for value, actual_value in zip(values, partition_values, strict=True):
        expected = transform_function(value)
        if transform.startswith("truncate") and value in (-(2**31), -(2**63)):
            continue  # The truncation overflows in Java and Seamark, but PyIceberg has unbounded integers.
        assert typed.are_same(expected, actual_value), (value, expected, actual_value)


def test_hash_of_bytes_is_murmur3() -> None:
    rng = random.Random(3)
    lengths = [*range(40), 100, 4095, 4096, 4097, 9001]
    parts = [rng.randbytes(length) for length in lengths]
    starts = np.cumsum([0, *lengths])
    hashes = _murmur.hash_spans(np.frombuffer(b"".join(parts), np.uint8), starts, 0, 32)
    assert hashes.tolist() == [mmh3.hash(part, signed=False) for part in parts]


SCHEMA = Schema(
    (
        Field(1, "id", False, "long"),
        Field(2, "name", False, "string"),
        Field(3, "at", False, "timestamp"),
        Field(4, "st", False, StructType((Field(5, "land", False, "string"),))),
        Field(6, "ratio", False, "double"),
    )
)


def build_spec(*fields: tuple[str, int]) -> PartitionSpec:
    partition_fields = [
        PartitionField(f"p{n}", transform, source, (), 1000 + n) for n, (transform, source) in enumerate(fields)
    ]
    return PartitionSpec(3, tuple(partition_fields))


def draw_rows(seed: int, count: int) -> pa.RecordBatch:
    rng = random.Random(seed)
    land = [rng.choice([None, {"land": None}, {"land": "de"}, {"land": "fr"}]) for _ in range(count)]
    values = {
        "id": typed.build_array("long", typed.draw_column(rng, "long", count)),
        "name": typed.build_array("string", typed.draw_column(rng, "string", count)),
        "at": typed.build_array("timestamp", typed.draw_column(rng, "timestamp", count)),
        "st": pa.array(land, pa.struct([("land", pa.string())])),
        "ratio": typed.build_array("double", typed.draw_column(rng, "double", count)),
    }
    return conform(pa.RecordBatch.from_pydict(values), SCHEMA, build_arrow_schema(SCHEMA))


@pytest.mark.parametrize(
    "fields",
    [
        [],
        [("identity", 2)],
        [("bucket[3]", 1), ("day", 3)],
        [("identity", 5), ("void", 1), ("truncate[1]", 2), ("year", 3)],
        [("identity", 6), ("identity", 1), ("identity", 2), ("identity", 3), ("hour", 3), ("identity", 5)],
        [("void", 1)],
    ],
    ids=str,
)
def test_every_row_is_in_the_partition_of_its_values(fields: list[tuple[str, int]]) -> None:
    for seed, row_count in enumerate([0, 1, 2, 300]):
        batch = draw_rows(seed, row_count)
        partitions = Partitioner(build_spec(*fields), SCHEMA).split(batch)
        columns: list[list[Any]] = []
        for transform, source_id in fields:
            column = SCHEMA.column(source_id)
            assert column is not None
            assert isinstance(column.type, str)
            column_name, _, field_name = column.name.partition(".")
            flat_values = batch.column(column_name)
            if field_name:
                structs = flat_values.to_pylist()
                flat_values = pa.array([None if struct is None else struct[field_name] for struct in structs])
            columns.append(
                [compute_transform(transform, column.type, value) for value in typed.to_plain(column.type, flat_values)]
            )
        all_row_numbers: list[int] = []
        for partition, row_indexes in partitions:
            row_numbers = list(range(row_count)) if row_indexes is None else row_indexes.tolist()
            assert row_numbers == sorted(row_numbers)
            all_row_numbers.extend(row_numbers)
            for row in row_numbers:
                assert typed.are_all_same([column[row] for column in columns], list(partition)), (seed, row)
        assert sorted(all_row_numbers) == list(range(row_count))
        keys = [repr([column[row] for column in columns]) for row in range(row_count)]
        assert len(partitions) == len(set(keys)), "a partition was split in two"


def test_partition_values_are_written_in_the_json_of_the_specification() -> None:
    partitioner = Partitioner(build_spec(("day", 3), ("identity", 6), ("void", 1), ("bucket[4]", 2)), SCHEMA)
    assert partitioner.convert_to_json((19_000, float("nan"), None, 3)) == ["2022-01-08", "NaN", None, 3]


@pytest.mark.parametrize(
    ("transform", "sources", "message"),
    [
        ("zorder", (1,), "zorder"),
        ("hour", (1,), "hour"),
        ("identity", (4,), "primitive"),
        ("bucket[4]", (1, 2), "one column"),
        ("identity", (99,), "one column"),
    ],
)
def test_spec_that_writers_do_not_support_is_refused(transform: str, sources: tuple[int, ...], message: str) -> None:
    field = PartitionField("part", transform, sources[0] if len(sources) == 1 else None, sources[1:] and sources, 1000)
    with pytest.raises(Unwritable, match=rf"part .*{message}"):
        Partitioner(PartitionSpec(1, (field,)), SCHEMA)


def test_partition_value_of_a_field_in_a_null_struct_is_null() -> None:
    batch = pa.RecordBatch.from_pydict(
        {name: [None] * 2 for name in ("id", "name", "at", "ratio")}
        | {"st": pa.array([None, {"land": "x"}], pa.struct([("land", pa.string())]))}
    )
    conformed_rows = conform(batch, SCHEMA, build_arrow_schema(SCHEMA))
    partitions = Partitioner(build_spec(("identity", 5)), SCHEMA).split(conformed_rows)
    assert {partition: positions.tolist() for partition, positions in partitions if positions is not None} == {
        ("x",): [1],
        (None,): [0],
    }
