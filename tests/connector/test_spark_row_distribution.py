"""The distribution of an upsert's rows over Spark tasks, and the number of tasks."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from seamark.connector.arrow.partitions import apply_transform
from seamark.connector.spark.frames import upserts as upserting
from seamark.formats.iceberg.metadata.partition import PartitionField, PartitionSpec
from seamark.formats.iceberg.types.schema import Field


def test_task_owns_files_only_if_it_has_all_their_keys() -> None:
    field = Field(1, "id", True, "long")
    keys = pa.array(range(5000))
    outcomes = set()
    for width, buckets, iceberg_count in itertools.product((1, 6, 8, 16), (1, 2, 3, 6, 8), (1, 2, 4, 6, 8, 16, 32)):
        distribution = upserting.RowDistribution((field,), min(width, buckets), 1, width)
        tasks_of_keys = distribution.assign_tasks([keys])
        assert tasks_of_keys.max() < distribution.tasks
        spec = PartitionSpec(0, (PartitionField("b", f"bucket[{iceberg_count}]", 1),))
        codes = apply_transform(f"bucket[{iceberg_count}]", "long", keys).codes
        is_scattered = any(len(set(tasks_of_keys[codes == code].tolist())) > 1 for code in range(iceberg_count))
        assert distribution.owns(spec) == (not is_scattered), (width, buckets, iceberg_count)
        outcomes.add(is_scattered)
    assert outcomes == {True, False}


def test_rows_of_one_bucket_with_many_keys_are_spread_over_all_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, a table has buckets by tenant, its key is (tenant, number), and all rows belong to one tenant."""
    monkeypatch.setattr(upserting, "find_record_index", lambda *_: None)  # The table has no index on its key.
    spec = PartitionSpec(0, (PartitionField("b", "bucket[16]", 1),))
    opened_table: Any = SimpleNamespace(metadata=SimpleNamespace(default_spec=spec, partition_specs=(spec,)))
    fields = [Field(1, "tenant", True, "string"), Field(2, "id", True, "long")]
    count = 20_000
    for join_fields in (fields, fields[::-1]):
        columns = {"tenant": pa.array(["acme"] * count, pa.large_string()), "id": pa.array(range(count))}
        distribution = upserting.RowDistribution.choose(opened_table, join_fields, 16 * upserting.TASK_ROWS, 4, None)
        assert distribution.tasks == 16
        sizes = Counter(distribution.assign_tasks([columns[field.name] for field in join_fields]).tolist())
        # No task has 20 % more rows than the average.
        assert max(sizes.values()) < 1.2 * count / distribution.tasks, sizes
        # The keys of a file are spread over several tasks, so no task may rewrite the file.
        assert not distribution.owns(spec)
    single_distribution = upserting.RowDistribution.choose(opened_table, fields[:1], 16 * upserting.TASK_ROWS, 4, None)
    # With the bucket's column as the whole key, all keys of a file belong to one task, which may rewrite the file.
    assert (single_distribution.tasks, single_distribution.owns(spec)) == (16, True)


def test_number_of_tasks_depends_on_the_rows_if_keys_are_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upserting, "find_record_index", lambda *_: "record(id)")  # The table seems to have an index.
    spec = PartitionSpec(0, ())
    opened_table: Any = SimpleNamespace(metadata=SimpleNamespace(default_spec=spec, partition_specs=(spec,)))
    # A task has 20,000 rows (TASK_ROWS_MIN), or more if there are fewer cores than tasks, up to 1,000,000 (TASK_ROWS).
    for count, cores, tasks in (
        (1, 4000, 1),
        (20_000, 4000, 1),
        (20_001, 4000, 2),
        (200_000, 4000, 10),
        (200_000, 4, 4),
        (9_000_000, 4, 9),
    ):
        distribution = upserting.RowDistribution.choose(
            opened_table, [Field(1, "id", True, "long")], count, cores, None
        )
        assert distribution.tasks == tasks, (count, cores)
