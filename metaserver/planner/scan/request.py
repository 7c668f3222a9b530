"""What a client asks of a plan, and which snapshot, schema and filter that means for a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import msgspec

from metaserver.errors import BadRequest
from metaserver.iceberg.expressions.binding import bind, terms_of
from metaserver.iceberg.expressions.expression import TRUE, And, Bound, Expression, Op, Unbound, all_of, predicates_of
from metaserver.iceberg.expressions.projection import ProjectedExpression, project
from metaserver.iceberg.metadata.metadata import TableMetadata
from metaserver.iceberg.metadata.snapshot import Snapshot
from metaserver.iceberg.types.schema import Schema
from metaserver.iceberg.types.values import decimal_scale
from metaserver.planner.pruning.dynamic_filters import DynamicFilter, parted

_LONG_CHARACTERS = 30_000
"""Of a bound filter's text; some hundreds of values, a millisecond of work."""


class ScanRequest(msgspec.Struct, frozen=True):
    """`filter` is unbound. A scan is of one snapshot (the current one by default), or incremental: of the files that
    appends added after `start_snapshot_id`, up to and with `end_snapshot_id`."""

    filter: Expression = TRUE
    snapshot_id: int | None = None
    start_snapshot_id: int | None = None
    end_snapshot_id: int | None = None
    case_sensitive: bool = True
    use_snapshot_schema: bool = False

    @property
    def incremental(self) -> bool:
        return self.start_snapshot_id is not None or self.end_snapshot_id is not None


class BoundScan(msgspec.Struct, frozen=True, dict=True):
    """A request as it concerns one table: everything that binding and projecting its filter gives, computed once.

    A filter may list a hundred thousand values: `is_long` says that work on it does not belong on the event loop.
    """

    metadata: TableMetadata
    request: ScanRequest
    snapshot: Snapshot | None
    schema: Schema
    bound: Expression
    dynamic_filters: tuple[DynamicFilter, ...] = ()
    """What joins demand beside the filter."""
    joined: bool = False
    """Whether joins demand anything, in the filter or beside it."""

    @classmethod
    def bind(
        cls, metadata: TableMetadata, request: ScanRequest, dynamic_filters: Sequence[DynamicFilter] = ()
    ) -> BoundScan:
        """BadRequest for a filter or snapshot that makes no sense. `dynamic_filters`: what joins demand of columns."""
        snapshot = resolve_snapshot(metadata, request)
        schema = resolve_schema(metadata, snapshot, request)
        bound = bind_filter(metadata, schema, request)
        asked = cls(metadata, request, snapshot, schema, bound)
        if dynamic_filters:
            asked = asked.joined_with(dynamic_filters)
        _ = asked.text  # as long as the filter: whoever asks with a long one does so in a thread
        return asked

    def joined_with(self, dynamic_filters: Sequence[DynamicFilter]) -> BoundScan:
        """The same, with what joins demand of columns."""
        few, many = parted(dynamic_filters)
        bound = all_of(self.bound, few)
        return BoundScan(self.metadata, self.request, self.snapshot, self.schema, bound, many, joined=True)

    @property
    def is_unfiltered(self) -> bool:
        """Not even that there are rows."""
        return self.request.filter == TRUE and not self.joined

    @cached_property
    def text(self) -> str:
        """The bound filter, for keys, and what tells the keys of joins from others. Not the expression itself: 0.0 and
        -0.0 are equal, and their plans are not."""
        return "\n".join([repr(self.bound), *(one.text for one in self.dynamic_filters)])

    @property
    def is_long(self) -> bool:
        return bool(self.dynamic_filters) or len(self.text) > _LONG_CHARACTERS

    @property
    def snapshot_id(self) -> int | None:
        return None if self.snapshot is None else self.snapshot.snapshot_id

    @cached_property
    def predicates(self) -> list[Bound]:
        return predicates_of(self.bound)

    @cached_property
    def projected(self) -> dict[int, ProjectedExpression]:
        """The filter as the partitions of each spec see it, by spec id."""
        return {spec.spec_id: project(self.bound, spec) for spec in self.metadata.partition_specs}

    @cached_property
    def demands(self) -> dict[int, Expression]:
        """By spec id, what the filter and the joins demand of partition values."""
        demands = {spec_id: projected.possible for spec_id, projected in self.projected.items()}
        if self.dynamic_filters:
            for spec in self.metadata.partition_specs:
                of_joins = (one.in_partitions(spec) for one in self.dynamic_filters)
                demands[spec.spec_id] = all_of(demands[spec.spec_id], *of_joins)
        return demands


def asked_by_java(metadata: TableMetadata, request: ScanRequest) -> BoundScan:
    """As Iceberg's Java means it. It asks for the snapshot's schema whenever it names a snapshot; but while a snapshot
    is a branch's newest, Spark asks by the names of the table's schema at that time. Those may be names of other
    columns in the snapshot's schema, or of columns whose type the literals are not of. A part of the filter that the
    schemas do not agree about leaves no file out.

    BadRequest for a filter that no schema can bind, and for a part that two schemas bind differently to partitions
    alone: Spark filters no row by what partition values decide, so the files have to be the right ones.
    """
    snapshot = resolve_snapshot(metadata, request)
    schema = resolve_schema(metadata, snapshot, request)
    others = _schemas_meanwhile(metadata, snapshot, schema) if request.use_snapshot_schema else []
    if not others:
        return BoundScan.bind(metadata, request)
    sure, ambiguous, filtered = [], [], set()
    for one in request.filter.children if isinstance(request.filter, And) else (request.filter,):
        part = msgspec.structs.replace(request, filter=one)
        readings = [_Reading.of(metadata, each, part) for each in (schema, *others)]
        bound = {repr(each.bound): each.bound for each in readings if each.bound is not None}
        if not bound:
            bind_filter(metadata, schema, part)  # raises, with what is wrong by the snapshot's schema
        elif all(each.terms == readings[0].terms for each in readings):
            sure.append(next(iter(bound.values())))
        elif not any(_is_of_partitions_alone(each, metadata) for each in bound.values()):
            if isinstance(one, Unbound) and one.op is not Op.IS_NULL:
                filtered.add(one.name)
        elif len(bound) == 1:  # no other schema can be meant
            sure += bound.values()
        else:
            ambiguous.append(one)
    # Beside each comparison Spark asks that the column is not null, which it filters by the comparison.
    if any(not (isinstance(one, Unbound) and one.op is Op.NOT_NULL and one.name in filtered) for one in ambiguous):
        raise BadRequest(
            "Columns that the filter names have changed names since the table's newest snapshot, and either may be "
            "meant; filter by columns that are no partitions', let the client plan (the table's property "
            "seamark.scan-planning-mode at client), or commit rows: any commit of rows ends that"
        )
    return BoundScan.bind(metadata, msgspec.structs.replace(request, filter=all_of(*sure)))


def names_are_ambiguous(metadata: TableMetadata) -> bool:
    """Whether a filter on the current snapshot may name a column that has another name, or is another column, in the
    snapshot's own schema: `asked_by_java` cannot tell then what is meant."""
    snapshot = metadata.current_snapshot
    then = None if snapshot is None or snapshot.schema_id is None else metadata.schema(snapshot.schema_id)
    if then is None or then.id == metadata.current_schema_id:
        return False
    by_name, now = _folded(then), _folded(metadata.current_schema)
    return any(ids != now.get(name, ids) for name, ids in by_name.items())


def _folded(schema: Schema) -> dict[str, set[int]]:
    """Columns by name without regard to case, as Spark names them."""
    found: dict[str, set[int]] = {}
    for name, column_id in schema.index.by_name.items():
        found.setdefault(name.lower(), set()).add(column_id)
    return found


def _schemas_meanwhile(metadata: TableMetadata, snapshot: Snapshot | None, schema: Schema) -> list[Schema]:
    """Other schemas that the table may have had while the snapshot was the newest of a branch: those from its own to
    the current one, or to the one by which the next snapshot was committed."""
    if snapshot is None or len(metadata.schemas) == 1:
        return []
    heads = {metadata.current_snapshot_id, *(ref.snapshot_id for ref in metadata.refs.values() if ref.is_branch)}
    last = {one.schema_id for one in metadata.snapshots if one.parent_snapshot_id == snapshot.snapshot_id} - {None}
    if snapshot.snapshot_id in heads:
        last.add(metadata.current_schema_id)
    ids = [schema.id, *(one for one in last if one is not None)]
    return [one for one in metadata.schemas if min(ids) <= one.id <= max(ids) and one.id != schema.id]


class _Reading(msgspec.Struct, frozen=True):
    """What a part of a filter means by one schema."""

    bound: Expression | None
    """None where the schema cannot bind it."""
    terms: tuple[tuple[int, str, str], ...] | None
    """Of each predicate the column, the transform and the family of types: alike in two schemas, so is the meaning."""

    @classmethod
    def of(cls, metadata: TableMetadata, schema: Schema, part: ScanRequest) -> _Reading:
        try:
            bound = bind_filter(metadata, schema, part)
            terms = terms_of(part.filter, schema, metadata.schemas, case_sensitive=part.case_sensitive)
        except BadRequest:
            return cls(None, None)
        return cls(bound, tuple((column_id, transform, _family(kind)) for column_id, transform, kind in terms))


def _family(kind: str) -> str:
    """The same for numbers of types that a column may be promoted between: a literal means the same in both."""
    if kind.startswith("decimal"):
        return f"decimal of scale {decimal_scale(kind)}"
    return {"int": "long", "float": "double"}.get(kind, kind)


def _is_of_partitions_alone(bound: Expression, metadata: TableMetadata) -> bool:
    """Whether a partition's values decide it for all rows, by every spec (ExpressionUtil.selectsPartitions in Java)."""
    return bool(predicates_of(bound)) and all(_is_exact(project(bound, spec)) for spec in metadata.partition_specs)


def _is_exact(projected: ProjectedExpression) -> bool:
    return all(map(_is_exact, projected.parts)) if projected.parts else projected.possible == projected.certain


def resolve_snapshot(metadata: TableMetadata, request: ScanRequest) -> Snapshot | None:
    """The snapshot that is read; None for a table without one. BadRequest for an id that the table does not have."""
    if request.incremental:
        if request.snapshot_id is not None:
            raise BadRequest("Ask for snapshot-id, or for start-snapshot-id and end-snapshot-id, not for both")
        return _required(metadata, request.end_snapshot_id, "end-snapshot-id")
    if request.snapshot_id is None:
        return metadata.current_snapshot
    return _required(metadata, request.snapshot_id, "snapshot-id")


def _required(metadata: TableMetadata, snapshot_id: int | None, name: str) -> Snapshot:
    if snapshot_id is None:
        raise BadRequest(f"An incremental scan needs {name}")
    snapshot = metadata.snapshot(snapshot_id)
    if snapshot is None:
        raise BadRequest(
            f"Cannot find snapshot {snapshot_id} ({name}): it is not, or no longer, in the table's metadata"
        )
    return snapshot


def appended(metadata: TableMetadata, request: ScanRequest) -> list[Snapshot]:
    """The append snapshots of an incremental scan, oldest first (Java's BaseIncrementalAppendScan).

    BadRequest unless the start is an ancestor of the end, or the parent of one whose metadata has expired.
    """
    end = _required(metadata, request.end_snapshot_id, "end-snapshot-id")
    start = request.start_snapshot_id
    found: list[Snapshot] = []
    for snapshot in _history(metadata, end):
        if snapshot.snapshot_id == start:
            break
        found.append(snapshot)
        if start is not None and snapshot.parent_snapshot_id == start:
            break
    else:
        if start is not None:
            raise BadRequest(f"start-snapshot-id {start} is not an ancestor of end-snapshot-id {end.snapshot_id}")
    return [snapshot for snapshot in reversed(found) if snapshot.summary_map().get("operation") == "append"]


def expired_ancestor(metadata: TableMetadata, end_snapshot_id: int | None) -> int | None:
    """The nearest ancestor of a snapshot whose metadata has expired: where an incremental scan without a start begins.

    None where all ancestors are there. BadRequest as for `appended`.
    """
    *_, oldest = _history(metadata, _required(metadata, end_snapshot_id, "end-snapshot-id"))
    return oldest.parent_snapshot_id


def _history(metadata: TableMetadata, end: Snapshot) -> Iterator[Snapshot]:
    """The snapshot and its ancestors, newest first, as far as they are known."""
    seen: set[int] = set()
    current: Snapshot | None = end
    while current is not None:
        if current.snapshot_id in seen:
            raise BadRequest(f"Snapshot {current.snapshot_id} is an ancestor of its own: its history has no beginning")
        seen.add(current.snapshot_id)
        yield current
        parent = current.parent_snapshot_id
        current = None if parent is None else metadata.snapshot(parent)


def resolve_schema(metadata: TableMetadata, snapshot: Snapshot | None, request: ScanRequest) -> Schema:
    """The snapshot's own schema where that is asked for and known, else the current one."""
    if request.use_snapshot_schema and snapshot is not None and snapshot.schema_id is not None:
        return metadata.schema(snapshot.schema_id) or metadata.current_schema
    return metadata.current_schema


def bind_filter(metadata: TableMetadata, schema: Schema, request: ScanRequest) -> Expression:
    return bind(request.filter, schema, metadata.schemas, case_sensitive=request.case_sensitive)
