"""A finished plan: which files of a view a reader has to open, and what to check on their rows."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from metaserver.iceberg.expressions.evaluation import may_match
from metaserver.iceberg.expressions.expression import Expression
from metaserver.iceberg.expressions.projection import ProjectedExpression, deciding_fields, project
from metaserver.iceberg.expressions.residuals import Residuals
from metaserver.iceberg.metadata.metadata import TableMetadata
from metaserver.iceberg.metadata.partition import PartitionSpec
from metaserver.iceberg.types.schema import Schema
from metaserver.iceberg.types.values import Value
from metaserver.index.blocks.packing import Longs
from metaserver.planner.deletes.delete_index import DeleteIndex
from metaserver.planner.view.view import TableView, comparable

_RESIDUALS_MAX = 1024
"""Residuals remembered per plan; partitions of one spec are few beside files, except where somebody made them many."""
_RESIDUAL_BYTES = 400


class IndexUse(msgspec.Struct, frozen=True, gc=False):
    """What one index did for a plan: of the files that it was asked about, how many it left out."""

    name: str
    kind: str
    files_in: int
    files_removed: int


class Stage(msgspec.Struct, frozen=True, gc=False):
    """One step of a plan: files and bytes that came in and that are left, and how long it took.

    They are -1 where nobody asked for them: counting takes a look at every file, and adding up reads its size.
    """

    name: str
    files_in: int
    files_left: int
    bytes_in: int
    bytes_left: int
    microseconds: int
    complete: bool = True
    """False when the time budget ended inside it: what was not checked is kept."""


class Scan:
    """`rows` int64[files]: rows of the view, in the order of the manifest list. Immutable but for what it remembers."""

    def __init__(
        self,
        view: TableView,
        deletes: DeleteIndex,
        rows: Longs,
        *,
        schema: Schema,
        bound: Expression,
        metadata: TableMetadata,
        stages: tuple[Stage, ...],
        snapshot_id: int | None,
        considered: int,
        complete: bool = True,
        indexes: tuple[IndexUse, ...] = (),
        projected: Mapping[int, ProjectedExpression] = MappingProxyType({}),
    ) -> None:
        """`projected` is `bound` by the ids of the metadata's specs, as far as that is at hand."""
        self.view = view
        self.rows = rows
        self.schema = schema
        self.bound = bound
        self.stages = stages
        self.complete = complete
        """False when time ran out, or an index was not there in time: another plan may keep fewer files."""
        self.indexes = indexes
        self.snapshot_id = snapshot_id
        self.considered = considered
        """Live files of the snapshot, those of manifests that did not have to be read included."""
        self.metadata = metadata
        """Of the table when it was planned; partition specs are looked up in it."""
        self._projections = dict(projected)
        self._deletes = deletes
        self._by_spec: dict[int, Residuals | None] = {}
        self._kinds: dict[int, dict[int, str]] = {}
        self._residuals: dict[tuple[int, object, object], Expression] = {}

    @property
    def files(self) -> int:
        return len(self.rows)

    @property
    def size_bytes(self) -> int:
        """What it adds to its view, with all that it may come to remember."""
        return int(self.rows.nbytes) + _RESIDUAL_BYTES * min(self.files, _RESIDUALS_MAX) + 2000

    def residual(self, row: int) -> Expression:
        """What is left of the filter for the rows of the file at this row of the view."""
        block, local = self.view.locate(row)
        return self.residual_in(block.spec_id, block.partition_fields, block.partition(local))

    def residual_in(
        self, spec_id: int, fields: tuple[tuple[int, str], ...], partition: tuple[Value | None, ...]
    ) -> Expression:
        """As `residual`, by partition: (field id, type) and value of each field that the manifest has, in its order."""
        residuals = self._residuals_of(spec_id) if self.deciding(spec_id) else None
        if residuals is None:
            return self.bound
        # By text: 0.0 and -0.0 are equal, and their residuals are not. Most partitions have neither.
        zero = any(value == 0 and isinstance(value, float) for value in partition)
        key = (spec_id, fields, repr(partition) if zero else partition)
        found = self._residuals.get(key)
        if found is None:
            found = residuals(self._values_of(spec_id, fields, partition))
            if len(self._residuals) >= _RESIDUALS_MAX:
                self._residuals.clear()
            self._residuals[key] = found
        return found

    def may_match(self, spec_id: int, fields: tuple[tuple[int, str], ...], partition: tuple[Value | None, ...]) -> bool:
        """Whether the residual is not FALSE, by what the filter demands of partitions alone: many terms are none."""
        spec = self.metadata.spec(spec_id)
        if spec is None:
            return True
        demand = self._projection(spec_id, spec).possible
        return may_match(demand, self._values_of(spec_id, fields, partition))

    def _projection(self, spec_id: int, spec: PartitionSpec) -> ProjectedExpression:
        found = self._projections.get(spec_id)
        if found is None:
            found = self._projections[spec_id] = project(self.bound, spec)
        return found

    def _values_of(
        self, spec_id: int, fields: tuple[tuple[int, str], ...], partition: tuple[Value | None, ...]
    ) -> dict[int, Value | None]:
        """Those that decide parts of the filter, by field id."""
        kinds = self.deciding(spec_id)
        return {
            field_id: value
            for (field_id, stored), value in zip(fields, partition, strict=True)
            if value is None or comparable(stored, kinds.get(field_id, ""))
        }

    def deciding(self, spec_id: int) -> Mapping[int, str]:
        """The partition fields whose values decide parts of the filter, by id, and the type that they must be of for
        that. Empty where the whole filter is left in every partition; so it is where the metadata lack the spec."""
        kinds = self._kinds.get(spec_id)
        if kinds is None:
            spec = self.metadata.spec(spec_id)
            kinds = {} if spec is None else deciding_fields(self._projection(spec_id, spec), spec)
            self._kinds[spec_id] = kinds
        return kinds

    def _residuals_of(self, spec_id: int) -> Residuals | None:
        if spec_id not in self._by_spec:
            spec = self.metadata.spec(spec_id)
            known = None if spec is None else self._projection(spec_id, spec)
            self._by_spec[spec_id] = None if spec is None else Residuals(self.bound, spec, known)
        return self._by_spec[spec_id]

    def deletes(self, row: int) -> tuple[int, ...]:
        """Delete rows of the view that apply to the data file at this row."""
        return self._deletes.applying(row)

    def deletes_of(self, rows: Longs) -> list[tuple[int, ...]]:
        """As `deletes`, of many rows at once."""
        return self._deletes.applying_to(rows)
