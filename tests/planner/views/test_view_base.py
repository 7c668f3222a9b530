"""Tests that a view which reuses columns of a neighbouring snapshot's view equals a view made from scratch.

Snapshots add, remove, reorder and repeat manifests, whose columns differ: absent bounds, types that were widened, and
decimals of both forms.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from seamark.formats.iceberg.manifests.manifest import ManifestFile, decode_manifest
from seamark.metaserver.index.blocks.block import Block
from seamark.metaserver.index.blocks.encoding import encode_block
from seamark.metaserver.planner.view.view import BoundColumn, ColumnStatistics, PartitionValues, TableView
from tests.planner.lakes.kinds import to_bytes
from tests.planner.lakes.lake import DATA, DataFile
from tests.planner.lakes.manifests import ADDED, Entry, PartitionField, Style, build_manifest_bytes
from tests.planner.lakes.metrics import ColumnMetrics
from tests.seeds import first_seed

STYLE = Style(has_shuffled_fields=False, sparse=False, codec="null", old_names=False, summaries=False, seed=0)
KINDS = [("int", "long"), ("float", "double"), ("string",), ("decimal(10, 2)", "decimal(30, 2)")]
READ_KINDS = ["long", "double", "string", "decimal(30, 2)"]
SPECS = [
    (),
    (PartitionField(1000, "c1", 1, "identity"), PartitionField(1001, "c3", 3, "identity")),
    (PartitionField(1002, "c4", 4, "identity"), PartitionField(1001, "c3", 3, "identity")),
]
PARTITIONS = [(1000, "long"), (1001, "string"), (1002, "decimal(30, 2)")]
SNAPSHOTS = 12


def draw_value(kind: str, rng: random.Random, spread: int = 1000) -> Any:
    if kind == "string" and spread > 1000:
        return "".join(rng.choice("abcdefgh") for _ in range(rng.randrange(5, 12)))
    if kind == "string":
        return "".join(rng.choice("ab") for _ in range(rng.randrange(12)))
    if kind in ("float", "double"):
        return rng.choice([0.0, -0.0, float(rng.randrange(-99, 99)), float("inf")])
    return rng.randrange(-spread, spread)


def make_block(
    name: str, rng: random.Random, *, rows: int | None = None, spread: int = 1000, absent: float = 0.2
) -> Block:
    """Return a block of a manifest whose schema has one type of each pair in `KINDS`.

    Args:
        rows: The number of files. The default is a random number up to 5.
        spread: The range of the values.
        absent: The fraction of the columns without metrics, and of the bounds that are missing.
    """
    kinds = {number: rng.choice(pair) for number, pair in enumerate(KINDS, start=1)}
    spec_id = rng.randrange(len(SPECS))
    fields = SPECS[spec_id]
    null_partitions_share = rng.choice([0.0, 0.5, 1.0])
    entries = []
    for row in range(rows or rng.randrange(1, 6)):
        metrics = {}
        for column_id, kind in kinds.items():
            if rng.random() < absent:
                continue
            values = sorted(draw_value(kind, rng, spread) for _ in range(2))
            bounds = [to_bytes(kind, end) if rng.random() >= absent else None for end in values]
            nulls = rng.choice([0, 0, 5, 10])
            nans = 0 if kind in ("float", "double") else None
            lower, upper = bounds
            metrics[column_id] = ColumnMetrics(values=10, nulls=nulls, nans=nans, lower=lower, upper=upper)
        path = f"file:///t/{name}-{row}.parquet"
        partition = tuple(
            None if rng.random() < null_partitions_share else draw_value(kinds[field.source], rng) for field in fields
        )
        record_count = rng.choice([0, 10, 10])
        file = DataFile(path, DATA, "PARQUET", spec_id, partition, record_count, size=100, metrics=metrics)
        entries.append(Entry(ADDED, snapshot_id=1, sequence=None, file_sequence=None, file=file))
    columns = [{"id": n, "name": f"c{n}", "required": False, "type": kind} for n, kind in kinds.items()]
    schema = {"type": "struct", "schema-id": 0, "fields": columns}
    data = build_manifest_bytes(
        entries, version=2, content=0, style=STYLE, spec_id=spec_id, fields=fields, kinds=kinds, schema=schema
    )
    return Block(b"".join(encode_block(decode_manifest(data, f"file:///t/{name}.avro"))))


def describe_statistics(column: ColumnStatistics) -> list[Any]:
    parts: list[Any] = [column.rows_read, list(column.entries)]
    for side in (*column.lower, *column.upper):
        assert isinstance(side, BoundColumn)
        parts += [side.form, side.layout.tolist(), side.low.tolist(), side.high.tolist(), list(side.packed)]
    for flags in (column.nulls_only, column.nans_only, column.no_nulls, column.no_nans):
        parts.append(None if flags is None else np.asarray(flags).tolist())
    return parts


def describe_partition_values(column: PartitionValues) -> list[Any]:
    parts: list[Any] = [column.known.tolist(), column.nulls.tolist(), list(column.packed)]
    parts += [column.has_nulls, column.is_known_for_all_blocks]
    for side in column.sides:
        parts += [side.form, side.layout.tolist(), side.low.tolist(), side.high.tolist(), list(side.packed)]
    return parts


def describe_view(view: TableView) -> list[Any]:
    parts: list[Any] = [view.starts, view.file_count, view.extents.tolist(), view.spec_ids.tolist(), view.specs]
    return [*parts, view.blocks_with_empty_files]


@pytest.mark.parametrize(
    "round_number", [*range(4), *(pytest.param(round_number, marks=pytest.mark.slow) for round_number in range(4, 200))]
)
def test_columns_reused_from_another_view_equal_the_columns_of_a_new_view(round_number: int) -> None:
    seed = first_seed() * 1000 + round_number
    rng = random.Random(seed)
    blocks = [make_block(f"m{number}", rng) for number in range(6)]
    listed_blocks: list[Block] = rng.sample(blocks, 4)
    base: TableView | None = None
    reused_count = 0
    for snapshot in range(SNAPSHOTS):
        view = TableView([build_manifest() for _ in listed_blocks], listed_blocks, base=base)
        fresh_view = TableView([build_manifest() for _ in listed_blocks], listed_blocks)
        for column_id, kind in enumerate(READ_KINDS, start=1):
            if rng.random() < 0.7:
                assert describe_statistics(view.find_statistics(column_id, kind)) == describe_statistics(
                    fresh_view.find_statistics(column_id, kind)
                ), f"seed {seed}"
                reused_count += base is not None and base.find_computed_stats(column_id, kind) is not None
        for field_id, kind in PARTITIONS:
            if rng.random() < 0.7:
                assert describe_partition_values(view.partition(field_id, kind)) == describe_partition_values(
                    fresh_view.partition(field_id, kind)
                ), f"seed {seed}"
        assert describe_view(view) == describe_view(fresh_view), f"seed {seed}"
        new_manifests = [build_manifest() for _ in range(3)]
        choices = rng.choices([*view.manifests, *new_manifests], k=6)
        blocks_by_manifest = {id(manifest): block for manifest, block in zip(view.manifests, view.blocks, strict=True)}
        assert view.find_blocks(choices) == [blocks_by_manifest.get(id(choice)) for choice in choices], f"seed {seed}"
        base = view if rng.random() < 0.8 else None
        for _ in range(rng.randrange(1, 4)):
            change = rng.random()
            if change < 0.5:
                blocks.append(make_block(f"n{snapshot}", rng))
                listed_blocks = [blocks[-1], *listed_blocks]
            elif change < 0.7 and len(listed_blocks) > 1:
                listed_blocks = [block for block in listed_blocks if block is not listed_blocks[-1]] or listed_blocks
            elif change < 0.85:
                listed_blocks = rng.sample(listed_blocks, len(listed_blocks))
            else:
                listed_blocks = [*listed_blocks, rng.choice(listed_blocks)]
    assert reused_count, f"seed {seed}"


def build_manifest() -> ManifestFile:
    return ManifestFile("m", 0, 0, 0, 1, 1)
