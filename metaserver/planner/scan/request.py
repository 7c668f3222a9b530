"""Scan requests, and the snapshot, the schema and the bound filter that a request resolves to in a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from seamark.formats.iceberg.expressions.binding import bind, list_terms
from seamark.formats.iceberg.expressions.expression import (
    TRUE,
    And,
    Bound,
    Expression,
    Op,
    Unbound,
    collect_predicates,
    join_by_and,
)
from seamark.formats.iceberg.expressions.expression_json import parse_expression
from seamark.formats.iceberg.expressions.projection import ProjectedExpression, project
from seamark.formats.iceberg.expressions.residuals import add_nan
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.iceberg.types.values import get_decimal_scale
from seamark.formats.protocol.wire import decode_json
from seamark.formats.runtime.errors import BadRequest
from seamark.formats.runtime.memoization import computed_once
from seamark.metaserver.planner.pruning.dynamic_filters import DynamicFilter, split_by_size
from seamark.metaserver.planner.scan.attribute_columns import AttributeColumn, add_to_schema, split_filter

LONG_FILTER_BYTES = 64 << 10
"""The minimum length of a JSON filter that counts as long. Work on a shorter filter takes only milliseconds."""
_LONG_TEXT_CHARACTERS = 30_000
"""The minimum length of the text of a bound filter that counts as long.

A filter of this length has some hundred values, and work on it takes about 1 ms.
"""


ViewKey = tuple[str, ...]


class ScanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a scan besides its filter: which snapshots it reads, and the meaning of names and comparisons.

    A scan reads one snapshot, by default the current snapshot. An incremental scan reads the files that appends added
    after `start_snapshot_id`, up to and including `end_snapshot_id`.
    """

    snapshot_id: int | None = None
    start_snapshot_id: int | None = None
    end_snapshot_id: int | None = None
    case_sensitive: bool = True
    use_snapshot_schema: bool = False
    nan_above: bool = False
    """Whether NaN matches `>` and `>=` of floats, as in Spark and DuckDB. The filter then gets `OR column IS NAN`."""
    may_delete_files: bool = False
    """Whether the client may delete the files of the plan by metadata (`plan/metadata_deletes.py`)."""

    @property
    def is_incremental(self) -> bool:
        return self.start_snapshot_id is not None or self.end_snapshot_id is not None


class ScanRequest(ScanOptions, frozen=True, kw_only=True):
    """A scan that a component of the server requests, with an unbound filter."""

    filter: Expression = TRUE
    attributes: tuple[AttributeColumn, ...] = ()
    """The attributes of dimension tables that the filter names."""


class PinnedRequest(ScanOptions, frozen=True, kw_only=True, array_like=True):
    """A scan that a client requests, with fixed values for all options that could change before the scan ends.

    Plan tasks and plan ids contain the pinned request (`tokens.py`). An incremental scan has no `snapshot_id`.
    """

    schema_id: int
    """The id of the table's current schema at planning time, so that names keep their meaning after a rename."""
    filter_json: bytes = b""
    """The filter in JSON, as the client sent it. It is empty if the request has no filter."""
    stats_fields: tuple[str, ...] = ()
    residuals: bool = True
    sequence_numbers: bool = False
    may_rewrite_files: bool = False
    """Whether the client may rewrite the files. If it may, its reader must not skip rows."""
    functions: bool = False
    """Whether the filter may use functions of SQL (`formats/iceberg/types/functions.py`)."""
    fresh: bytes = b""
    """The fresh snapshot to read, as JSON. It is empty if the scan reads a snapshot of the table."""
    attributes: tuple[AttributeColumn, ...] = ()
    """The attributes of dimension tables that the filter names."""

    @property
    def has_long_filter(self) -> bool:
        """Whether work on the filter must run in a thread. A filter may list two hundred thousand values."""
        return len(self.filter_json) > LONG_FILTER_BYTES

    def bind(self, metadata: TableMetadata) -> BoundScan:
        """Parse the filter and bind it as Java's library does.

        A filter may also name attributes, which are columns of a dimension table that an index of this table contains.
        Java's library only sends filters on columns of the table itself, so a filter with attributes is from another
        client, and is bound to one schema.

        Raises:
            BadRequest: The filter is invalid.
        """
        filter = self.parse_filter()
        if not self.attributes:
            return bind_for_java(metadata, self, filter)
        snapshot = resolve_snapshot(metadata, self)
        schema = resolve_schema(metadata, snapshot, self)
        return BoundScan.bind_by_schema(schema, metadata, self, snapshot, filter, self.attributes)

    def parse_filter(self) -> Expression:
        """Return the filter, which is not bound.

        Raises:
            BadRequest: The filter is invalid.
        """
        if not self.filter_json:
            return TRUE
        filter_json = decode_json(self.filter_json, "The filter")
        return parse_expression(filter_json, unknown=True, functions=self.functions)


class BoundScan(msgspec.Struct, frozen=True, dict=True):
    """A scan that is bound to a table. The results of binding and projecting its filter are computed once.

    A filter may list a hundred thousand values. If `is_long` is True, work on the filter must run in a thread, not in
    the event loop.
    """

    metadata: TableMetadata
    options: ScanOptions
    snapshot: Snapshot | None
    schema: Schema
    bound: Expression
    is_unfiltered: bool = False
    """Whether the filter is the constant TRUE. Such a scan returns all files, including files without rows."""
    dynamic_filters: tuple[DynamicFilter, ...] = ()
    """The dynamic filters with many keys. Dynamic filters with few keys are part of `bound`."""
    attribute_filter: Expression = TRUE
    """A further condition, with predicates on attributes of dimension tables (`formats/index/keys/lookups.py`).

    Only indexes evaluate it. It is not part of `bound`, because clients cannot evaluate these predicates on rows.
    """

    @classmethod
    def bind(cls, metadata: TableMetadata, request: ScanRequest) -> BoundScan:
        """Bind a request to its snapshot, and to the schema that `resolve_schema` returns.

        Raises:
            BadRequest: The filter or the snapshot id is invalid.
        """
        snapshot = resolve_snapshot(metadata, request)
        schema = resolve_schema(metadata, snapshot, request)
        return cls.bind_by_schema(schema, metadata, request, snapshot, request.filter, request.attributes)

    @classmethod
    def bind_by_schema(
        cls,
        schema: Schema,
        metadata: TableMetadata,
        options: ScanOptions,
        snapshot: Snapshot | None,
        filter: Expression,
        attributes: Sequence[AttributeColumn] = (),
    ) -> BoundScan:
        """Bind a filter by the schema and the snapshot that the options resolve to.

        Raises:
            BadRequest: The filter is invalid.
        """
        bound = bind_filter(metadata, add_to_schema(schema, attributes), options, filter)
        bound, attribute_filter = split_filter(bound, schema, attributes)
        bound_scan = cls(metadata, options, snapshot, schema, bound, filter == TRUE, attribute_filter=attribute_filter)
        _ = bound_scan.text  # Compute it here, because callers bind long filters in a thread.
        return bound_scan

    def join_with(
        self,
        dynamic_filters: Sequence[DynamicFilter],
        condition: Expression = TRUE,
        attribute_filter: Expression = TRUE,
    ) -> BoundScan:
        """Return the same scan with further filters.

        Dynamic filters with few keys become part of the condition. The others are evaluated separately.

        Args:
            dynamic_filters: The dynamic filters.
            condition: A condition that is bound to the columns of the scan.
            attribute_filter: A condition on attributes of dimension tables.
        """
        small_condition, large_filters = split_by_size(dynamic_filters)
        bound = join_by_and(self.bound, small_condition, condition)
        attribute_filter = join_by_and(self.attribute_filter, attribute_filter)
        return BoundScan(
            self.metadata,
            self.options,
            self.snapshot,
            self.schema,
            bound,
            dynamic_filters=large_filters,
            attribute_filter=attribute_filter,
        )

    @computed_once
    def text(self) -> str:
        """Return the bound filter and all further filters as text, for cache keys.

        The key is not the expression itself, because 0.0 and -0.0 are equal as values, but their plans differ.
        """
        bound = repr(self.bound)
        if not self.dynamic_filters and self.attribute_filter == TRUE:
            return bound
        dynamic_filters = (dynamic_filter.text for dynamic_filter in self.dynamic_filters)
        return "\n".join([bound, repr(self.attribute_filter), *dynamic_filters])

    @property
    def is_long(self) -> bool:
        return bool(self.dynamic_filters) or len(self.text) > _LONG_TEXT_CHARACTERS

    @property
    def snapshot_id(self) -> int | None:
        return None if self.snapshot is None else self.snapshot.snapshot_id

    @computed_once
    def view_key(self) -> ViewKey:
        """The key of the view that the scan reads. All scans of the same snapshots have the same key.

        A table without a snapshot has an empty view. An incremental scan reads the snapshots of its appends.
        """
        if self.snapshot is None:
            return ("",)
        if self.options.is_incremental:
            return ("appends", *map(_make_list_key, list_appends(self.metadata, self.options)))
        return (_make_list_key(self.snapshot),)

    @computed_once
    def predicates(self) -> list[Bound]:
        return collect_predicates(self.bound)

    @computed_once
    def filter_projections(self) -> dict[int, ProjectedExpression]:
        """The filter, projected onto the partition fields of each spec, by spec id."""
        return {spec.spec_id: project(self.bound, spec) for spec in self.metadata.partition_specs}

    @computed_once
    def partition_filters(self) -> dict[int, Expression]:
        """The condition on partition values that follows from the filter and the dynamic filters, by spec id."""
        partition_filters = {spec_id: projection.possible for spec_id, projection in self.filter_projections.items()}
        if self.dynamic_filters:
            for spec in self.metadata.partition_specs:
                projection = (dynamic_filter.project_to_partitions(spec) for dynamic_filter in self.dynamic_filters)
                partition_filters[spec.spec_id] = join_by_and(partition_filters[spec.spec_id], *projection)
        return partition_filters


def bind_for_java(metadata: TableMetadata, options: ScanOptions, filter: Expression) -> BoundScan:
    """Bind a filter with the meaning that Iceberg's Java library gives it.

    If the library names a snapshot in a request, it also requests the snapshot's schema. But while a snapshot is the
    head of a branch, Spark uses the column names of the table's schema at that time. In the snapshot's schema, these
    names may belong to other columns, or to columns of a type that the literals do not fit. If two schemas bind a
    conjunct of the filter differently, this conjunct prunes no file.

    Raises:
        BadRequest: No schema can bind the filter. Or two schemas bind a conjunct on partition columns differently:
            Spark leaves such a conjunct to the plan and does not filter rows by it, so the plan cannot ignore it.
    """
    snapshot = resolve_snapshot(metadata, options)
    schema = resolve_schema(metadata, snapshot, options)
    other_schemas = find_schemas_while_head(metadata, snapshot, schema) if options.use_snapshot_schema else []
    if not other_schemas:
        return BoundScan.bind_by_schema(schema, metadata, options, snapshot, filter)
    sure_conditions, ambiguous_conjuncts, filtered_names = [], [], set()
    for conjunct in filter.children if isinstance(filter, And) else (filter,):
        variants = [_BoundConjunct.bind(metadata, other, options, conjunct) for other in (schema, *other_schemas)]
        bound_by_text = {repr(variant.bound): variant.bound for variant in variants if variant.bound is not None}
        if not bound_by_text:
            # This call raises the error that the snapshot's schema causes.
            bind_filter(metadata, schema, options, conjunct)
        elif all(variant.terms == variants[0].terms for variant in variants):
            sure_conditions.append(next(iter(bound_by_text.values())))
        elif not any(_selects_partitions(bound, metadata) for bound in bound_by_text.values()):
            if isinstance(conjunct, Unbound) and conjunct.op is not Op.IS_NULL:
                filtered_names.add(conjunct.name)
        elif len(bound_by_text) == 1:
            # Only one schema can bind this conjunct.
            sure_conditions += bound_by_text.values()
        else:
            ambiguous_conjuncts.append(conjunct)
    # Spark adds a not-null predicate to each comparison, and filters rows by the comparison. So the plan need not be
    # exact for a not-null predicate on a compared column.
    if any(
        not (isinstance(conjunct, Unbound) and conjunct.op is Op.NOT_NULL and conjunct.name in filtered_names)
        for conjunct in ambiguous_conjuncts
    ):
        raise BadRequest(
            "The filter names columns that were renamed since the table's newest snapshot, so the names are ambiguous. "
            "Filter by columns that are not partition sources, plan on the client (set the table's property "
            "seamark.scan-planning-mode to client), or commit rows: the next snapshot resolves the ambiguity"
        )
    return BoundScan.bind_by_schema(schema, metadata, options, snapshot, join_by_and(*sure_conditions))


def has_ambiguous_names(metadata: TableMetadata) -> bool:
    """Return whether a name in a filter on the current snapshot may mean different columns.

    The current schema and the snapshot's own schema differ if columns were renamed after the snapshot.

    The result is True if a name of the snapshot's schema belongs to a different column in the current schema.
    """
    snapshot = metadata.current_snapshot
    snapshot_schema = None if snapshot is None or snapshot.schema_id is None else metadata.schema(snapshot.schema_id)
    if snapshot_schema is None or snapshot_schema.id == metadata.current_schema_id:
        return False
    by_name, current_ids = _map_ids_by_folded_name(snapshot_schema), _map_ids_by_folded_name(metadata.current_schema)
    return any(ids != current_ids.get(name, ids) for name, ids in by_name.items())


def _map_ids_by_folded_name(schema: Schema) -> dict[str, set[int]]:
    """Return the column ids by lower-case name, because Spark ignores case."""
    ids_by_name: dict[str, set[int]] = {}
    for name, column_id in schema.index.by_name.items():
        ids_by_name.setdefault(name.lower(), set()).add(column_id)
    return ids_by_name


def find_schemas_while_head(metadata: TableMetadata, snapshot: Snapshot | None, schema: Schema) -> list[Schema]:
    """Return the schemas other than `schema` that the table may have had while the snapshot was the newest of a branch.

    These are the schemas after the snapshot's own schema, up to the current schema or to the schema of the next
    snapshot.
    """
    if snapshot is None or len(metadata.schemas) == 1:
        return []
    heads = {metadata.current_snapshot_id, *(ref.snapshot_id for ref in metadata.refs.values() if ref.is_branch)}
    children = (child for child in metadata.snapshots if child.parent_snapshot_id == snapshot.snapshot_id)
    # Schema ids ascend, so the schemas between the smallest and the largest id may have been current.
    ids = [schema.id, *(child.schema_id for child in children if child.schema_id is not None)]
    if snapshot.snapshot_id in heads:
        ids.append(metadata.current_schema_id)
    return [other for other in metadata.schemas if min(ids) <= other.id <= max(ids) and other.id != schema.id]


class _BoundConjunct(msgspec.Struct, frozen=True):
    """A conjunct of a filter, bound by one schema."""

    bound: Expression | None
    """The bound conjunct, or None if the schema cannot bind it."""
    terms: tuple[tuple[int, str, str], ...] | None
    """The column, transform and type family of each predicate.

    If they are equal for two schemas, the conjunct has the same meaning in both schemas.
    """

    @classmethod
    def bind(
        cls, metadata: TableMetadata, schema: Schema, options: ScanOptions, conjunct: Expression
    ) -> _BoundConjunct:
        """Bind a conjunct of a filter by one schema. If the schema cannot bind it, both values are None."""
        try:
            bound = bind_filter(metadata, schema, options, conjunct)
            terms = list_terms(conjunct, schema, metadata.schemas, case_sensitive=options.case_sensitive)
        except BadRequest:
            return cls(None, None)
        return cls(
            bound, tuple((column_id, transform, _find_type_family(kind)) for column_id, transform, kind in terms)
        )


def _find_type_family(kind: str) -> str:
    """Return the family of a type. A literal has the same meaning for all types of a family.

    A column can have several types of a family over time.
    """
    if kind.startswith("decimal"):
        return f"decimal of scale {get_decimal_scale(kind)}"
    return {"int": "long", "float": "double"}.get(kind, kind)


def _selects_partitions(bound: Expression, metadata: TableMetadata) -> bool:
    """Return whether partition values decide the expression for all rows in every spec.

    Java: ExpressionUtil.selectsPartitions.
    """
    return bool(collect_predicates(bound)) and all(_is_exact(project(bound, spec)) for spec in metadata.partition_specs)


def _is_exact(projection: ProjectedExpression) -> bool:
    return all(map(_is_exact, projection.parts)) if projection.parts else projection.possible == projection.certain


def resolve_snapshot(metadata: TableMetadata, options: ScanOptions) -> Snapshot | None:
    """Return the snapshot to read, or None for a table without snapshots.

    Raises:
        BadRequest: The snapshot id is unknown, or an incremental scan also has a snapshot id.
    """
    if options.is_incremental:
        if options.snapshot_id is not None:
            raise BadRequest(
                "The request has snapshot-id, and also start-snapshot-id or end-snapshot-id; send only one of the two"
            )
        return _require_snapshot(metadata, options.end_snapshot_id, "end-snapshot-id")
    if options.snapshot_id is None:
        return metadata.current_snapshot
    return _require_snapshot(metadata, options.snapshot_id, "snapshot-id")


def _require_snapshot(metadata: TableMetadata, snapshot_id: int | None, name: str) -> Snapshot:
    """Return the snapshot that the field `name` of a request states.

    Raises:
        BadRequest: The id is missing, or the table does not have the snapshot.
    """
    if snapshot_id is None:
        raise BadRequest(f"An incremental scan requires {name}; send it")
    snapshot = metadata.snapshot(snapshot_id)
    if snapshot is None:
        raise BadRequest(
            f"Cannot find snapshot {snapshot_id} ({name}) in the table's metadata; it does not exist or has expired"
        )
    return snapshot


def list_appends(metadata: TableMetadata, options: ScanOptions) -> list[Snapshot]:
    """Return the append snapshots of an incremental scan, oldest first (Java: BaseIncrementalAppendScan).

    Raises:
        BadRequest: The start is neither an ancestor of the end, nor the expired parent of an ancestor.
    """
    end = _require_snapshot(metadata, options.end_snapshot_id, "end-snapshot-id")
    start = options.start_snapshot_id
    ancestors: list[Snapshot] = []
    for snapshot in _walk_ancestors(metadata, end):
        if snapshot.snapshot_id == start:
            break
        ancestors.append(snapshot)
        # The start may have expired. It is then still the parent of an ancestor.
        if start is not None and snapshot.parent_snapshot_id == start:
            break
    else:
        if start is not None:
            raise BadRequest(f"start-snapshot-id {start} is not an ancestor of end-snapshot-id {end.snapshot_id}")
    return [snapshot for snapshot in reversed(ancestors) if snapshot.build_summary_map().get("operation") == "append"]


def find_expired_ancestor(metadata: TableMetadata, end_snapshot_id: int | None) -> int | None:
    """Return the id of the nearest ancestor that has expired. An incremental scan without a start begins after it.

    Returns:
        None if the metadata have all ancestors.

    Raises:
        BadRequest: The end is missing or unknown, or the history has a cycle.

    """
    *_, oldest = _walk_ancestors(metadata, _require_snapshot(metadata, end_snapshot_id, "end-snapshot-id"))
    return oldest.parent_snapshot_id


def _walk_ancestors(metadata: TableMetadata, end: Snapshot) -> Iterator[Snapshot]:
    """Yield the snapshot and those of its ancestors that the metadata contain, newest first.

    Raises:
        BadRequest: A snapshot is its own ancestor.
    """
    visited_ids: set[int] = set()
    current: Snapshot | None = end
    while current is not None:
        if current.snapshot_id in visited_ids:
            raise BadRequest(
                f"Snapshot {current.snapshot_id} is its own ancestor; the table's snapshot history has a cycle"
            )
        visited_ids.add(current.snapshot_id)
        yield current
        parent = current.parent_snapshot_id
        current = None if parent is None else metadata.snapshot(parent)


def _make_list_key(snapshot: Snapshot) -> str:
    return snapshot.manifest_list or "\n".join(snapshot.manifests or ())


def resolve_schema(metadata: TableMetadata, snapshot: Snapshot | None, options: ScanOptions) -> Schema:
    """Return the schema whose names the filter uses.

    This is the snapshot's own schema if the request uses it and the metadata contain it. Otherwise, it is the current
    schema.
    """
    if options.use_snapshot_schema and snapshot is not None and snapshot.schema_id is not None:
        return metadata.schema(snapshot.schema_id) or metadata.current_schema
    return metadata.current_schema


def bind_filter(metadata: TableMetadata, schema: Schema, options: ScanOptions, filter: Expression) -> Expression:
    bound = bind(filter, schema, metadata.schemas, case_sensitive=options.case_sensitive)
    return add_nan(bound) if options.nan_above else bound
