"""The result of planning: the files of a view that a reader must open, and the residual filter of each file."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from types import MappingProxyType

import msgspec
import numpy as np

from seamark.formats.iceberg.expressions.evaluation import may_match
from seamark.formats.iceberg.expressions.expression import TRUE, Expression
from seamark.formats.iceberg.expressions.projection import ProjectedExpression, find_deciding_fields, project
from seamark.formats.iceberg.expressions.residuals import Residuals
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.partition import PartitionSpec
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.iceberg.types.values import Value
from seamark.formats.index.packing import Longs
from seamark.metaserver.planner.deletes.delete_index import DeleteIndex
from seamark.metaserver.planner.view.view import TableView, are_comparable

_RESIDUALS_MAX = 1024
"""The maximum number of cached residuals of one plan. A spec usually has far fewer partitions than files."""
_PLAN_BYTES, _RESIDUAL_BYTES = 2000, 400
"""The estimated memory of a plan without its files and residuals, and of one cached residual."""


class IndexUse(msgspec.Struct, frozen=True, gc=False):
    """The effect of one index on a scan plan: the number of files that it checked, and the number that it removed."""

    name: str
    kind: str
    files_in: int
    files_removed: int


class PruningStage(msgspec.Struct, frozen=True, gc=False):
    """One stage of a plan: the files and bytes before and after the stage, and its duration.

    Files and bytes are -1 if the request does not ask for them, because counting them reads the size of every file.
    """

    name: str
    files_in: int
    files_left: int
    bytes_in: int
    bytes_left: int
    microseconds: int
    complete: bool = True
    """Whether the stage ended within the time budget. If not, the files that it did not check are kept."""


class ScanPlan:
    """The result of planning one scan.

    `entry_ids`, int64[files], are the files to read, in the order of the manifest list (`view.py`). Apart from its
    caches, an instance is immutable.
    """

    def __init__(
        self,
        view: TableView,
        deletes: DeleteIndex,
        entry_ids: Longs,
        *,
        schema: Schema,
        bound: Expression,
        metadata: TableMetadata,
        stages: tuple[PruningStage, ...],
        snapshot_id: int | None,
        considered_files: int,
        complete: bool = True,
        indexes: tuple[IndexUse, ...] = (),
        projection: Mapping[int, ProjectedExpression] = MappingProxyType({}),
    ) -> None:
        """Create a plan.

        Args:
            view: The view of the snapshot, with all files.
            deletes: The delete files of the view.
            entry_ids: The numbers of the kept files in the view, ascending.
            schema: The schema of the filter.
            bound: The filter.
            metadata: The metadata of the table.
            stages: The stages of pruning.
            snapshot_id: The id of the snapshot, or None for a table without snapshots.
            considered_files: The number of live files of the snapshot.
            complete: Whether all files were checked in time.
            indexes: The effects of indexes.
            projection: `bound`, projected onto the specs of the metadata, by spec id. Projections that are not computed
                yet are missing.
        """
        self.view = view
        self.entry_ids = entry_ids
        self.schema = schema
        self.bound = bound
        self.stages = stages
        self.complete = complete
        """False if the time budget ended, or if an index was not loaded in time. A later plan may keep fewer files."""
        self.indexes = indexes
        self.snapshot_id = snapshot_id
        self.considered = considered_files
        """The number of live files of the snapshot, including files of manifests that were not read."""
        self.metadata = metadata
        """The metadata of the table at planning time. They contain the partition specs."""
        self._projections = dict(projection)
        self._deletes = deletes
        self._residuals_by_spec: dict[int, Residuals | None] = {}
        self._deciding_fields: dict[int, dict[int, str]] = {}
        self._residuals: dict[tuple[int, object, object], Expression] = {}

    @property
    def files(self) -> int:
        return len(self.entry_ids)

    @property
    def size_bytes(self) -> int:
        """The memory of the plan without its view, if all caches of the plan are full."""
        return _PLAN_BYTES + int(self.entry_ids.nbytes) + _RESIDUAL_BYTES * min(self.files, _RESIDUALS_MAX)

    def with_file(self, entry_id: int) -> ScanPlan:
        """Return the plan with one more file of the view."""
        plan = copy(self)
        plan.entry_ids = np.insert(self.entry_ids, self.entry_ids.searchsorted(entry_id), entry_id)
        return plan

    def with_only(self, entry_ids: Longs) -> ScanPlan:
        """Return the plan with only these files, in this order."""
        plan = copy(self)
        plan.entry_ids = entry_ids
        return plan

    def find_first_files_with_rows(self, min_rows: int, files_max: int) -> Longs:
        """Return the first files that certainly contain `min_rows` matching rows in total.

        Only the rows of files without a residual and without deletes count. If the first `files_max` files have too few
        rows, all files are returned, because checking more files would take too long.
        """
        sure_rows = 0
        for count, entry_id in enumerate(self.entry_ids[:files_max].tolist(), start=1):
            if self.compute_residual(entry_id) == TRUE and not self.deletes(entry_id):
                block, local = self.view.locate(entry_id)
                sure_rows += max(0, block.read_long("record_count", local) or 0)
                if sure_rows >= min_rows:
                    return self.entry_ids[:count]
        return self.entry_ids

    def compute_residual(self, entry_id: int) -> Expression:
        """Return the residual of the filter for a data file: the part that its partition values do not decide."""
        block, local = self.view.locate(entry_id)
        return self.compute_partition_residual(block.spec_id, block.partition_fields, block.partition(local))

    def compute_partition_residual(
        self, spec_id: int, fields: tuple[tuple[int, str], ...], partition: tuple[Value | None, ...]
    ) -> Expression:
        """Return the residual for a partition: the part of the filter that its partition values do not decide.

        If no partition field of the spec decides a part of the filter, the residual is the filter itself.

        Args:
            spec_id: The id of the partition spec.
            fields: The id and the type of each partition field, in the order of the manifest.
            partition: The value of each field.
        """
        compute_residual = self._get_residuals(spec_id) if self.find_deciding_fields(spec_id) else None
        if compute_residual is None:
            return self.bound
        # The key contains the text of the values, because 0.0 equals -0.0, but their residuals differ. Few
        # partitions have zeros.
        has_zero = any(value == 0 and isinstance(value, float) for value in partition)
        key = (spec_id, fields, repr(partition) if has_zero else partition)
        residual = self._residuals.get(key)
        if residual is None:
            residual = compute_residual(self._find_deciding_values(spec_id, fields, partition))
            if len(self._residuals) >= _RESIDUALS_MAX:
                self._residuals.clear()
            self._residuals[key] = residual
        return residual

    def may_match(self, spec_id: int, fields: tuple[tuple[int, str], ...], partition: tuple[Value | None, ...]) -> bool:
        """Return whether a partition may contain a matching row, according to its values.

        If the result is False, the residual is FALSE.
        """
        spec = self.metadata.spec(spec_id)
        if spec is None:
            return True
        condition = self._project_filter(spec_id, spec).possible
        return may_match(condition, self._find_deciding_values(spec_id, fields, partition))

    def _project_filter(self, spec_id: int, spec: PartitionSpec) -> ProjectedExpression:
        """Return the filter, projected onto the partition fields of a spec."""
        projection = self._projections.get(spec_id)
        if projection is None:
            projection = self._projections[spec_id] = project(self.bound, spec)
        return projection

    def _find_deciding_values(
        self, spec_id: int, fields: tuple[tuple[int, str], ...], partition: tuple[Value | None, ...]
    ) -> dict[int, Value | None]:
        """Return the values of the partition that decide conjuncts of the filter, by field id.

        A value is left out if its type in the manifest cannot be compared with the field's current type.
        """
        kinds = self.find_deciding_fields(spec_id)
        return {
            field_id: value
            for (field_id, stored_type), value in zip(fields, partition, strict=True)
            if value is None or are_comparable(stored_type, kinds.get(field_id, ""))
        }

    def find_deciding_fields(self, spec_id: int) -> Mapping[int, str]:
        """Return the types of the partition fields whose values decide conjuncts of the filter, by field id.

        The result is empty if no partition value decides a conjunct, or if the metadata do not have the spec.
        """
        kinds = self._deciding_fields.get(spec_id)
        if kinds is None:
            spec = self.metadata.spec(spec_id)
            kinds = {} if spec is None else find_deciding_fields(self._project_filter(spec_id, spec), spec)
            self._deciding_fields[spec_id] = kinds
        return kinds

    def _get_residuals(self, spec_id: int) -> Residuals | None:
        """Return the residuals of a spec, or None if the metadata lack the spec."""
        if spec_id not in self._residuals_by_spec:
            spec = self.metadata.spec(spec_id)
            projection = None if spec is None else self._project_filter(spec_id, spec)
            self._residuals_by_spec[spec_id] = None if spec is None else Residuals(self.bound, spec, projection)
        return self._residuals_by_spec[spec_id]

    def deletes(self, entry_id: int) -> tuple[int, ...]:
        """Return the delete files that apply to a data file, as rows of the view's delete blocks."""
        return self._deletes.find_deletes_for_file(entry_id)

    def find_deletes_by_file(self, entry_ids: Longs) -> list[tuple[int, ...]]:
        """Return, for each data file, the delete files that apply to it, as rows of the view's delete blocks."""
        return self._deletes.find_deletes(entry_ids)
