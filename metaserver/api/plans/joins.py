"""Decoding and evaluation of joins in requests about a table.

The joins are checked against the other tables and the caller's rights. The caller needs the right to read every joined
table. A refusal has the same error as the route that loads the joined table.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from aiohttp import web

from seamark.formats.iceberg.expressions.binding import bind
from seamark.formats.iceberg.expressions.comparisons import resolve_literals
from seamark.formats.iceberg.expressions.expression import FALSE, TRUE, Expression, Not
from seamark.formats.iceberg.expressions.expression_json import parse_expression
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.schema import Column, ListType, MapType, Schema, describe_type, is_primitive
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.protocol.wire import LIKES_MAX, PATTERN_MAX, RANGE, check_name, decode_json
from seamark.formats.runtime.errors import BadRequest
from seamark.formats.runtime.lazy_module import LazyModule
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.api.http.components import COMPONENTS
from seamark.metaserver.api.http.describe import doc
from seamark.metaserver.api.http.dispatch import Call
from seamark.metaserver.api.http.fresh_reads import load_to_read
from seamark.metaserver.api.http.parameters.snapshots import resolve_snapshot_id
from seamark.metaserver.api.http.sql_texts import read_in_turn
from seamark.metaserver.planner.joins.dimension_columns import DimensionColumn
from seamark.metaserver.planner.joins.dimensions import Dimensions, get_dimension_limits
from seamark.metaserver.planner.joins.extremes import EXTREMES
from seamark.metaserver.planner.joins.joins import (
    JoinFilters,
    JoinOutcome,
    Pair,
    RequestedJoin,
    add_star_conditions,
    build_join_filters,
    get_canonical_kind,
)
from seamark.metaserver.planner.joins.like_predicates import (
    AnyLike,
    BoundLike,
    LikePredicate,
)
from seamark.metaserver.planner.joins.periods import can_identify_period
from seamark.metaserver.planner.joins.ranges import can_limit_by_extreme, can_limit_by_range
from seamark.metaserver.planner.scan.request import BoundScan
from seamark.metaserver.store.model import TABLE, Entry, PlanJoin

if TYPE_CHECKING:
    from seamark.formats.iceberg.expressions import sql
else:
    sql = LazyModule("seamark.formats.iceberg.expressions.sql")

DEPTH_MAX = 4
JOINS_MAX = 32
"""The maximum number of joins of one request, including nested joins."""
COLUMNS_MAX = 16
"""The maximum number of columns of one join."""

DIMENSIONS: web.AppKey[Dimensions] = web.AppKey("dimensions", Dimensions)


class JoinSpec(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """A join in a request."""

    table: Annotated[
        list[str],
        doc("The levels of the namespace and the name of the other table.", examples=[["ssb", "supplier"]]),
    ]
    on: Annotated[
        dict[str, str],
        doc(
            "The columns of this table, each with the column of the other table that is equal to it.",
            examples=[{"lo_suppkey": "s_suppkey"}],
        ),
    ]
    predicate: Annotated[
        str | None, doc("A predicate in SQL on columns of the other table.", examples=["s_region = 'AMERICA'"])
    ] = None
    filter: Annotated[
        msgspec.Raw,
        doc("An expression of the Iceberg REST specification on the other table, instead of `predicate`."),
    ] = msgspec.field(default_factory=msgspec.Raw)
    likes: Annotated[
        list[list[LikePredicate]],
        doc(
            "LIKE predicates on string columns of the other table, also in lower or upper case. At least one "
            f"predicate of each inner list must be true. There are at most {LIKES_MAX} predicates, with patterns of "
            f"at most {PATTERN_MAX} characters.",
            examples=[[{"column": "p_name", "pattern": "%green%"}]],
        ),
    ] = []
    transform: Annotated[
        Literal["day", "month", "year", "hour", "min", "max", "range"] | None,
        doc(
            "With a period, the other table's column contains the start of this period of the column, as a date or a "
            "timestamp. For `year`, it may also contain the number of the year. With `min` or `max`, the column is "
            "compared by `operator` with the least or the greatest value of the other table's column in the rows that "
            "satisfy the filter. With `range`, it is compared by `operator` with the other table's column."
        ),
    ] = None
    operator: Annotated[
        Literal["=", "<", "<=", ">", ">="] | None,
        doc("With `min`, `max` or `range`: `column operator value`. The default is `=`; `range` needs another one."),
    ] = None
    end: Annotated[
        str | None,
        doc(
            "With `range` and the operator `>` or `>=`: in the same row, this column of the other table is not less "
            "than the column.",
            examples=["valid_until"],
        ),
    ] = None
    end_operator: Annotated[Literal["<", "<="], doc("`<` if the column is less than `end`.")] = "<="
    exact: Annotated[
        bool,
        doc(
            "With `min` or `max`: the extreme is that of exactly the rows that satisfy `filter`; without a filter, of "
            "all rows. If `exact` is false, or if there is a `predicate`, it may be that of fewer rows, so that it has "
            "only one limit."
        ),
    ] = False
    any_of: Annotated[
        int | None, doc("Joins with the same number are alternatives: a row must satisfy at least one of them.")
    ] = None
    exempt_condition: Annotated[
        msgspec.Raw,
        doc(
            "An expression of the Iceberg REST specification on this table. Rows that match it need neither a row of "
            "the other table nor a row of an alternative."
        ),
    ] = msgspec.field(default_factory=msgspec.Raw, name="unless")
    snapshot_id: Annotated[int | None, doc("A snapshot of the other table. The default is the current snapshot.")] = (
        None
    )
    joins: Annotated[
        list[JoinSpec],
        doc(f"Inner joins of the other table with further tables, nested {DEPTH_MAX} levels at most."),
    ] = []


Joins = Annotated[
    list[JoinSpec],
    doc(
        "Inner joins that filter this table's rows, combined by AND. The other table of each join must have a row "
        f"that is equal in all columns of `on` and satisfies `predicate`. There are at most {JOINS_MAX} joins, "
        "including nested joins."
    ),
]
JoinOutcomes = Annotated[
    tuple[JoinOutcome, ...] | msgspec.UnsetType,
    doc(
        "The outcome of each join; nested joins follow their parent. Present only if the request has joins. "
        "`snapshot-id` is the evaluated snapshot of the other table; the result ignores rows of later snapshots. "
        "`keys` are the remaining distinct keys, for several columns the smallest number; null if the other table was "
        "not read. `indexes` are the indexes on its attributes that evaluate the filter. `reason` is the reason why "
        "the join was not used, or its keys were not."
    ),
]


async def evaluate_joins(
    call: Call, bound_scan: BoundScan, entry: Entry | None, joins: Sequence[JoinSpec]
) -> tuple[JoinFilters, JoinOutcomes, tuple[PlanJoin, ...]]:
    """Evaluate the joins of a request.

    Returns:
        The filters that the joins imply for the rows of the scan, their outcomes for the answer, and their tables.

    Raises:
        BadRequest: A join is invalid.
        Forbidden: The caller may not read a joined table.
        NotFound: A joined table does not exist.
    """
    if not joins:
        return JoinFilters((), ()), msgspec.UNSET, ()
    _check_join_count(joins)
    app = call.app
    requested_joins = [await _resolve_join(call, bound_scan.metadata, join) for join in joins]
    # Indexes of the table on attributes of the joined tables can evaluate conditions of the joins.
    requested_joins = await add_star_conditions(app[COMPONENTS].planner, bound_scan, entry, requested_joins)
    until_s = app[COMPONENTS].clock.monotonic() + app[COMPONENTS].settings.join_wait_s
    filters = await build_join_filters(app[DIMENSIONS], requested_joins, until_s)
    return filters, filters.outcomes, tuple(dict.fromkeys(_list_tables(requested_joins)))


def _list_tables(joins: Iterable[RequestedJoin]) -> Iterator[PlanJoin]:
    """Yield the tables of joins and of their nested joins."""
    for join in joins:
        yield PlanJoin(join.table, join.entry.uuid)
        yield from _list_tables(join.joins)


def _check_join_count(joins: Sequence[JoinSpec]) -> None:
    """Check the number and the depth of joins before a table is loaded.

    Raises:
        BadRequest: There are too many joins or levels.
    """
    join_count, joins_of_level = 0, list(joins)
    for _ in range(DEPTH_MAX):
        join_count += len(joins_of_level)
        joins_of_level = [nested_join for join in joins_of_level for nested_join in join.joins]
    if joins_of_level:
        raise BadRequest(f"The joins have more than {DEPTH_MAX} nested levels; leave out the inner levels")
    if join_count > JOINS_MAX:
        raise BadRequest(f"The request has {join_count} joins; the limit is {JOINS_MAX}")


async def _resolve_join(call: Call, metadata: TableMetadata, spec: JoinSpec) -> RequestedJoin:
    """Load the other table of a join, check the caller's right, and bind the join.

    Raises:
        BadRequest: The join is invalid.
        Forbidden: The caller may not read the other table.
    """
    if len(spec.table) < 2:
        raise BadRequest(f"The table of a join is {spec.table}; it needs the levels of the namespace and the name")
    namespace, name = tuple(check_name(level, "namespace") for level in spec.table[:-1]), spec.table[-1]
    await call.allow(Securable(namespace, TABLE, check_name(name, "table name")))
    loaded_table = await load_to_read(call, namespace, name, spec.snapshot_id)
    table_name = ".".join(spec.table)
    other_metadata, entry = loaded_table.metadata, loaded_table.entry
    assert entry is not None
    if not 1 <= len(spec.on) <= COLUMNS_MAX:
        raise BadRequest(
            f"The join with {table_name} has {len(spec.on)} columns in `on`; it must have 1 to {COLUMNS_MAX}"
        )
    try:
        snapshot_id = resolve_snapshot_id(other_metadata, spec.snapshot_id, None, None)
        # In a join by a range of values, a column in `on` is also compared with the column of the range's end.
        ends = [(name, spec.end) for name in spec.on] if spec.end is not None else []
        pairs = tuple(_bind_pair(metadata, other_metadata, *column_names) for column_names in (*spec.on.items(), *ends))
        expression = await _bind_filter(call, spec, other_metadata)
        exempt_condition = await _bind_exempt_condition(call, spec, metadata)
        negated_filter = await _bind_negated_filter(call, spec, other_metadata)
        likes = _bind_likes(spec, other_metadata)
        joins = [await _resolve_join(call, other_metadata, join) for join in spec.joins]
    except BadRequest as error:
        raise BadRequest(f"The join with {table_name}: {error.message}") from None
    transform = spec.transform or IDENTITY
    operators = _check_comparison(spec, transform, pairs, table_name)
    return RequestedJoin(
        table=tuple(spec.table),
        metadata=other_metadata,
        entry=entry,
        snapshot_id=snapshot_id,
        filter=expression,
        on=pairs,
        joins=tuple(joins),
        likes=likes,
        transform=transform,
        any_of=spec.any_of,
        exempt_condition=exempt_condition,
        operators=operators,
        outside=negated_filter,
    )


def _check_comparison(spec: JoinSpec, transform: str, pairs: Sequence[Pair], table_name: str) -> tuple[str, ...]:
    """Check the comparison of a join, and return its operators.

    Args:
        spec: The join in the request.
        transform: The transform of the join: the extremes min and max, a range, a period of a time, or identity.
        pairs: The pairs of columns that are compared.
        table_name: The name of the other table, for messages.

    Returns:
        The operators for the bound, and for the end if the join has one. They are empty for transforms without order.

    Raises:
        BadRequest: The join compares columns that its transform does not allow.
    """
    kinds = pairs[0].kind, pairs[0].other_kind
    is_ordered = transform in (*EXTREMES, RANGE)
    if not is_ordered and (spec.operator is not None or spec.end is not None):
        names = [name for name, text in (("operator", spec.operator), ("end", spec.end)) if text is not None]
        fields, verb = " and ".join(names), "needs" if len(names) == 1 else "need"
        raise BadRequest(
            f"The join with {table_name} has {fields}, which {verb} the transform min, max or range, not {transform}"
        )
    if is_ordered:
        can_limit = can_limit_by_range if transform == RANGE else can_limit_by_extreme
        is_valid_pair = len(spec.on) == 1 and all(can_limit(pair.kind, pair.other_kind) for pair in pairs)
        if not is_valid_pair:
            more_types = ", decimals of one scale, string, or float and double" if transform == RANGE else ""
            raise BadRequest(
                f"The join with {table_name}: the {transform} of {pairs[-1].other_kind} cannot limit {kinds[0]}; join "
                "on one pair of columns with the same type (int, long, date, timestamp or timestamptz), or with the "
                f"types int and long, or date and timestamp{more_types}"
            )
        operator = spec.operator or "="
        if spec.end is not None and (transform != RANGE or operator not in (">", ">=")):
            raise BadRequest(
                f"The join with {table_name} has an end, so it needs the transform range, and the operator > or >="
            )
        if transform == RANGE and operator == "=":
            raise BadRequest(f"The join with {table_name} is a range without an operator; send <, <=, > or >=")
        return (operator,) if spec.end is None else (operator, spec.end_operator)
    if transform != IDENTITY and (len(pairs) > 1 or not can_identify_period(transform, *kinds)):
        raise BadRequest(
            f"The join with {table_name}: the {transform} of {kinds[0]} cannot be compared with {kinds[1]}; join on "
            "one pair of a date or timestamp, and a date, a timestamp or, for year, an int"
        )
    return ()


async def _bind_exempt_condition(call: Call, spec: JoinSpec, metadata: TableMetadata) -> Expression:
    """Return the condition on rows that the join does not remove, or FALSE if it may remove every row."""
    filter_json = bytes(spec.exempt_condition)
    if not filter_json:
        return FALSE

    def read() -> Expression:
        return bind(
            parse_filter(filter_json, metadata), metadata.current_schema, metadata.schemas, case_sensitive=False
        )

    return await read_in_turn(call, len(filter_json), read)


async def _bind_filter(call: Call, spec: JoinSpec, metadata: TableMetadata) -> Expression:
    """Bind the filter of a join to the other table.

    Raises:
        BadRequest: The filter is invalid.
    """
    schema, schemas = metadata.current_schema, metadata.schemas
    filter_json, predicate = bytes(spec.filter), spec.predicate
    if filter_json and predicate is not None:
        raise BadRequest("the join has both predicate and filter; send SQL or an Iceberg expression")

    def read() -> Expression:
        if predicate is None:
            return bind(parse_filter(filter_json, metadata), schema, schemas, case_sensitive=False)
        return bind(sql.parse_sql(predicate, schema, schemas).expression, schema, schemas, case_sensitive=True)

    return await read_in_turn(call, len(filter_json) + len(predicate or ""), read)


async def _bind_negated_filter(call: Call, spec: JoinSpec, metadata: TableMetadata) -> Expression | None:
    """Bind the negation of the join's filter to the other table.

    Joins with a minimum or maximum of the other table use it to find files in which all rows match the filter.

    Returns:
        A condition that is true for every row of the other table that the filter does not keep.
        None if no such condition is known, because the client's filter is only a part of its condition or is SQL.
        FALSE if there is no filter, because the join then keeps every row of the other table.
    """
    filter_json = bytes(spec.filter)
    if not spec.exact or spec.predicate is not None:
        return None
    if not filter_json:
        return FALSE

    def read() -> Expression:
        negated_filter = Not(parse_expression(decode_json(filter_json, "The filter"), typed=True))
        schema, schemas = metadata.current_schema, metadata.schemas
        return bind(resolve_literals(negated_filter, schema, schemas), schema, schemas, case_sensitive=False)

    return await read_in_turn(call, len(filter_json), read)


def _bind_likes(spec: JoinSpec, metadata: TableMetadata) -> tuple[AnyLike, ...]:
    if sum(map(len, spec.likes)) > LIKES_MAX:
        raise BadRequest(f"the join has more than {LIKES_MAX} LIKE predicates")
    return tuple(tuple(_bind_like(metadata, like) for like in likes) for likes in spec.likes if likes)


def _bind_like(metadata: TableMetadata, predicate: LikePredicate) -> BoundLike:
    """Return a LIKE predicate on a column of the other table.

    Raises:
        BadRequest: The column is not a string, or the pattern is invalid.
    """
    column = _find_column(metadata.current_schema, predicate.column)
    if column.type != "string":
        raise BadRequest(f"LIKE needs a string, but the column {column.name} is a {describe_type(column.type)}")
    try:
        _ = predicate.regex  # This compiles the pattern.
    except ValueError as error:
        raise BadRequest(f"The pattern of the column {column.name} is invalid: {error}") from None
    return BoundLike(DimensionColumn(column.id, "string"), predicate)


def parse_filter(data: bytes, metadata: TableMetadata, *, functions: bool = False) -> Expression:
    """Parse a `filter` to an unbound expression with typed literals, or return TRUE if there is no filter.

    Args:
        data: The JSON of the filter, or empty bytes if there is no filter.
        metadata: The metadata of the table.
        functions: Whether the filter may have functions; see `parse_expression`.

    Raises:
        BadRequest: The filter is invalid.
    """
    if not data:
        return TRUE
    expression = parse_expression(decode_json(data, "The filter"), typed=True, functions=functions)
    return resolve_literals(expression, metadata.current_schema, metadata.schemas)


def _bind_pair(metadata: TableMetadata, other_metadata: TableMetadata, own_name: str, other_name: str) -> Pair:
    """Return the pair of columns by which the tables are joined.

    `own_name` is a column of the table of the scan, and `other_name` is a column of the other table.

    Raises:
        BadRequest: A column does not exist, or cannot be a column of a join.
    """
    own_column, other_column = (
        _find_column(metadata.current_schema, own_name),
        _find_column(other_metadata.current_schema, other_name),
    )
    return Pair(
        own_column.id,
        own_column.name,
        get_canonical_kind(own_column.type),
        other_column.id,
        get_canonical_kind(other_column.type),
    )


def _find_column(schema: Schema, name: str) -> Column:
    """Return the column with a name. The case is ignored if the name is then still unique.

    Raises:
        BadRequest: The column does not exist, or does not have exactly one value in each row.
    """
    column = schema.find_column_by_name(name)
    if column is None:
        matching_ids = {
            column_id for other_name, column_id in schema.index.by_name.items() if other_name.lower() == name.lower()
        }
        if len(matching_ids) != 1:
            problem = "is not" if not matching_ids else f"may be one of {len(matching_ids)} columns"
            raise BadRequest(f"The column {name[:200]!r} {problem} in the table's schema")
        column = schema.index.by_id[matching_ids.pop()]
    is_inside_container = any(
        isinstance(ancestor.type, ListType | MapType) for ancestor in schema.list_ancestors(column)
    )
    if is_inside_container or not is_primitive(column.type):
        problem = "is inside a list or a map" if is_inside_container else f"is a {describe_type(column.type)}"
        raise BadRequest(
            f"The column {column.name} {problem}; join on a column of a primitive type outside lists and maps"
        )
    return column


async def _open_dimensions(app: web.Application) -> AsyncIterator[None]:
    """Create the object that reads dimension tables, and close it when the server stops."""
    components = app[COMPONENTS]
    dimensions = Dimensions(
        components.planner, components.objects, components.clock, get_dimension_limits(components.settings)
    )
    app[DIMENSIONS] = dimensions
    yield
    await dimensions.close()


def add_joins(app: web.Application) -> None:
    """Add the components that routes with joins need."""
    app.cleanup_ctx.append(_open_dimensions)
