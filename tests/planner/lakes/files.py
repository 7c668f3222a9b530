"""Random data files and delete files of a lake: their rows, partitions and metrics."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tests.planner.lakes import partitioning
from tests.planner.lakes.kinds import FLOATS, compute_sort_key
from tests.planner.lakes.lake import (
    DATA,
    EQUALITY_DELETES,
    PATH_ID,
    POSITION_DELETES,
    POSITION_ID,
    DataFile,
    DeleteFile,
    Row,
)
from tests.planner.lakes.manifests import PartitionField
from tests.planner.lakes.metrics import ColumnMetrics, draw_metrics, truncate_upper
from tests.planner.lakes.schemas import Field, LakeColumn, Schema

Spec = tuple[PartitionField, ...]


@dataclass
class _RowChoices:
    """The choices for drawing the rows of one file.

    Attributes:
        choices: The values by column id.
        nulls, nans: The rates of null and NaN by column id.
        present, absent: The ids of structs that must be present or absent.
    """

    choices: dict[int, list[Any]]
    nulls: dict[int, float]
    nans: dict[int, float]
    present: set[int]
    absent: set[int]


class FileMaker:
    """A source of random data files and delete files. `pools` has the values of each column."""

    def __init__(self, rng: random.Random, location: str, pools: dict[int, list[Any]]) -> None:
        self._rng = rng
        self._location = location
        self._pools = pools
        self._file_count = 0

    def make_data_file(
        self, schema: Schema, spec_id: int, fields: Spec, kinds: dict[int, str], *, like: DataFile | None = None
    ) -> DataFile:
        """Return a data file in the partition of `like`, or in the partition of a random first row.

        Most files have one to eight rows, because few rows give narrow bounds, and Parquet is the most frequent format.
        """
        rng = self._rng
        columns = schema.list_columns()
        row_choices = self._choose_values(schema)
        first_row = like.rows[0] if like is not None and like.rows else self._build_row(schema.fields, row_choices)
        partition = tuple(partitioning.apply(p.transform, kinds[p.source], first_row.get(p.source)) for p in fields)
        if like is not None:
            partition = like.partition
        self._limit_to_partition(row_choices, first_row, fields, kinds, columns)
        count = 0 if rng.random() < 0.02 or (like is not None and not like.rows) else rng.choice([1, 1, 2, 3, 5, 8])
        rows = [self._build_row(schema.fields, row_choices) for _ in range(count)]
        leaves = schema.leaves()
        metrics = {key: draw_metrics(rng, leaf.kind, [row.get(key) for row in rows]) for key, leaf in leaves.items()}
        offsets = rng.choice([None, [4], [4, 1_000_000], []])
        return DataFile(
            path=self._create_path("data", ".parquet"),
            content=DATA,
            format=rng.choice(["PARQUET", "PARQUET", "parquet", "AVRO", "ORC"]),
            spec_id=spec_id,
            partition=partition,
            record_count=count,
            size=rng.randint(400, 5_000_000_000),
            metrics={key: value for key, value in metrics.items() if value != ColumnMetrics()},
            split_offsets=offsets,
            rows=rows,
            written_columns=frozenset(columns),
            schema_id=schema.id,
        )

    def _create_path(self, folder: str, ending: str) -> str:
        self._file_count += 1
        part = self._rng.choice(["", "", "p=a%2Fb/", "två ord/", "x=1/y=null/"])
        return f"{self._location}/{folder}/{part}{self._file_count:05d}-{self._rng.getrandbits(32):08x}{ending}"

    def _choose_values(self, schema: Schema) -> _RowChoices:
        """Choose which values the columns of a file may have, and how often nulls and NaNs occur.

        A column may have few values that follow each other in its order, so that the bounds of files differ. Most
        columns have no nulls, and some have only nulls.
        """
        rng = self._rng
        row_choices = _RowChoices({}, {}, {}, set(), set())
        for column in schema.list_columns().values():
            row_choices.nulls[column.id] = 0.0 if column.required else rng.choice([0, 0, 0, 0.3, 1])
            if column.kind == "struct":
                row_choices.nulls[column.id] = 0.0 if column.required else rng.choice([0, 0, 0.3])
                continue
            values = sorted(self._pools[column.id], key=partial(compute_sort_key, column.kind))
            if column.kind == "uuid":  # UUIDs are drawn at random, so that each file has values of the whole range.
                rng.shuffle(values)
            width = rng.choice([1, 2, 4, len(values)])
            start = rng.randrange(max(1, len(values) - width + 1))
            row_choices.choices[column.id] = values[start : start + width]
            row_choices.nans[column.id] = rng.choice([0, 0, 0.3, 1]) if column.kind in FLOATS else 0.0
        return row_choices

    def _limit_to_partition(
        self,
        row_choices: _RowChoices,
        first_row: Row,
        fields: Spec,
        kinds: dict[int, str],
        columns: dict[int, LakeColumn],
    ) -> None:
        """Limit `row_choices` to rows of the partition that the first row belongs to."""
        for source in {part.source for part in fields}:
            value = first_row.get(source)
            parents = columns[source].parents
            if value is None:
                # A required column is null only if a struct around it is null.
                removed_parents = {parent for parent in parents if first_row.get(parent) is None}
                row_choices.absent |= removed_parents
                row_choices.nulls[source] = 1.0
                continue
            row_choices.present |= set(parents)
            row_choices.nulls[source] = 0.0
            if isinstance(value, float) and math.isnan(value):
                row_choices.nans[source] = 1.0
                continue
            row_choices.nans[source] = 0.0
            transforms = [part.transform for part in fields if part.source == source]

            def compute_keys(value: Any, transforms: list[str] = transforms, kind: str = kinds[source]) -> list[str]:
                return [repr(partitioning.apply(transform, kind, value)) for transform in transforms]

            equal_values = [
                candidate for candidate in row_choices.choices[source] if compute_keys(candidate) == compute_keys(value)
            ]
            row_choices.choices[source] = equal_values or [value]

    def _build_row(self, fields: tuple[Field, ...], row_choices: _RowChoices) -> Row:
        row: Row = {}
        self._fill_row(fields, row_choices, row, absent=False)
        return row

    def _fill_row(self, fields: tuple[Field, ...], row_choices: _RowChoices, row: Row, *, absent: bool) -> None:
        """Set the value of each field in `row`. A struct that is present has the value True, and its fields follow.

        Lists and maps get no value.

        Args:
            absent: Whether a parent struct is null, so that all fields are null.
        """
        rng = self._rng
        for field in fields:
            if isinstance(field.kind, tuple):
                is_null = field.id not in row_choices.present and (
                    field.id in row_choices.absent or rng.random() < row_choices.nulls[field.id]
                )
                row[field.id] = None if absent or is_null else True
                self._fill_row(field.kind, row_choices, row, absent=absent or is_null)
            elif isinstance(field.kind, str):
                if absent or rng.random() < row_choices.nulls[field.id]:
                    row[field.id] = None
                elif rng.random() < row_choices.nans[field.id]:
                    row[field.id] = math.nan
                else:
                    row[field.id] = rng.choice(row_choices.choices[field.id])

    # Delete files

    def make_equality_deletes(
        self, schema: Schema, specs: dict[int, Spec], live_files: list[DataFile], kinds: dict[int, str]
    ) -> list[DeleteFile]:
        """Return an equality delete file for the partition of a live file, or for all partitions.

        The key has one or two columns, and most keys are those of live rows. Return no file if no column can be a key.
        Also return no file if there is neither a live file nor an unpartitioned spec.
        """
        rng = self._rng
        # No equality deletes on floats: NaN and the zeros are not valid keys.
        possible_keys = [column for column in schema.leaves().values() if column.kind not in FLOATS]
        if not possible_keys:
            return []
        key_columns = sorted(
            rng.sample(possible_keys, min(len(possible_keys), rng.choice([1, 1, 2]))), key=lambda column: column.id
        )
        unpartitioned_specs = [key for key, fields in specs.items() if all(part.transform == "void" for part in fields)]
        file = rng.choice(live_files) if live_files else None
        if unpartitioned_specs and (file is None or rng.random() < 0.5):
            spec_id = rng.choice(unpartitioned_specs)
            partition: tuple[Any, ...] = tuple(None for _ in specs[spec_id])
        elif file is not None:
            spec_id, partition = file.spec_id, file.partition
        else:
            return []
        rows = [row for item in live_files if item.spec_id == spec_id and rng.random() < 0.5 for row in item.rows]
        keys = set()
        for _ in range(rng.choice([1, 1, 2, 4])):
            row = rng.choice(rows) if rows and rng.random() < 0.7 else {}
            keys.add(tuple(self._choose_key(column, row) for column in key_columns))
        sorted_keys = sorted(keys, key=repr)
        columns = {column.id: [key[index] for key in sorted_keys] for index, column in enumerate(key_columns)}
        metrics = {column.id: draw_metrics(rng, column.kind, columns[column.id]) for column in key_columns}
        delete = self._build_delete_file(EQUALITY_DELETES, spec_id, partition, len(sorted_keys))
        ids = [column.id for column in key_columns]
        kept_metrics = {
            key: column_metrics for key, column_metrics in metrics.items() if column_metrics != ColumnMetrics()
        }
        return [replace(delete, equality_ids=ids, keys=tuple(sorted_keys), metrics=kept_metrics)]

    def _choose_key(self, column: LakeColumn, row: Row) -> Any:
        if column.id in row:
            return row[column.id]
        if not column.required and self._rng.random() < 0.2:
            return None
        return self._rng.choice(self._pools[column.id])

    def make_position_deletes(self, files: list[DataFile]) -> list[DeleteFile]:
        """Return a list with a position delete file for one data file, or for several data files of one partition.

        Its bounds of the path are complete, are truncated to 16 characters, or are missing.
        """
        rng = self._rng
        chosen_file = rng.choice(files)
        targets = [chosen_file]
        if rng.random() < 0.5:
            targets = [file for file in files if file.partition_key == chosen_file.partition_key and rng.random() < 0.7]
        positions = self._choose_positions(targets or [chosen_file])
        delete = self._build_delete_file(POSITION_DELETES, chosen_file.spec_id, chosen_file.partition, len(positions))
        paths = sorted({path for path, _ in positions})
        row_positions = [position for _, position in positions]
        bounds_kind = rng.choice(["full", "full", "truncated", "none"])
        metrics: dict[int, ColumnMetrics] = {}
        if bounds_kind != "none":
            lower, upper = paths[0].encode(), paths[-1].encode()
            if bounds_kind == "truncated":
                truncated_path = truncate_upper(paths[-1], 16)
                lower, upper = paths[0][:16].encode(), truncated_path or upper
            metrics[PATH_ID] = ColumnMetrics(values=len(positions), nulls=0, lower=lower, upper=upper)
            bounds = [position.to_bytes(8, "little") for position in (min(row_positions), max(row_positions))]
            metrics[POSITION_ID] = ColumnMetrics(values=len(positions), nulls=0, lower=bounds[0], upper=bounds[1])
        referenced_path = paths[0] if len(paths) == 1 and rng.random() < 0.5 else None
        return [replace(delete, positions=frozenset(positions), metrics=metrics, referenced_path=referenced_path)]

    def _choose_positions(self, targets: list[DataFile]) -> list[tuple[str, int]]:
        positions = set()
        for file in targets:
            for position in range(max(1, file.record_count)):
                if position == 0 or self._rng.random() < 0.4:
                    positions.add((file.path, position))
        return sorted(positions)

    def build_vectors(
        self, files: list[DataFile], old_vectors: list[DeleteFile]
    ) -> tuple[list[DeleteFile], list[DeleteFile]]:
        """Return deletion vectors for some data files in one Puffin file, and the delete files that they replace.

        A vector includes the positions of older position deletes of its data file, as the specification requires.
        """
        rng = self._rng
        # The vectors of a Puffin file follow a magic of 4 bytes. Only their invented offsets and sizes are recorded.
        path, offset = self._create_path("data", ".puffin"), 4
        new_entries, replaced_vectors = [], []
        for file in rng.sample(files, min(len(files), rng.choice([1, 1, 2, 3]))):
            positions = {(file.path, index) for index in range(max(1, file.record_count)) if rng.random() < 0.6}
            for delete in old_vectors:
                pairs = {pair for pair in delete.positions if pair[0] == file.path}
                positions |= pairs
                if delete.is_vector and delete.referenced_path == file.path:
                    replaced_vectors.append(delete)
            positions = positions or {(file.path, 0)}
            size = rng.randint(30, 90)
            delete_file = self._build_delete_file(POSITION_DELETES, file.spec_id, file.partition, len(positions))
            new_entries.append(
                replace(
                    delete_file,
                    path=path,
                    format="PUFFIN",
                    positions=frozenset(positions),
                    referenced_path=file.path,
                    content_offset=offset,
                    content_size=size,
                )
            )
            offset += size
        return new_entries, replaced_vectors

    def _build_delete_file(self, content: int, spec_id: int, partition: tuple[Any, ...], count: int) -> DeleteFile:
        return DeleteFile(
            path=self._create_path("data", "-deletes.parquet"),
            content=content,
            format="PARQUET",
            spec_id=spec_id,
            partition=partition,
            record_count=count,
            size=self._rng.randint(300, 90_000),
            metrics={},
        )
