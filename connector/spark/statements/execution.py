"""Runs MERGE, UPDATE and DELETE on the rows that an index or a filter locates, and INSERT OVERWRITE.

    result = execute(spark, "MERGE INTO sea.db.t USING changed AS s ON t.id = s.id …")
    result.path, result.reason, result.report

The rows of a statement are located if a part of its condition restricts the stored rows that it can change. This part
is an equality with constants, with a subquery or with the source's rows, or it is a filter that the server can plan.
Spark then runs the statement's own query on these rows (`row_changes.py`), and one commit replaces them. Otherwise, and
if anything fails before the commit, Iceberg runs the statement. The result and the error are then those of `spark.sql`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from seamark.connector.arrow.casting import Unwritable
from seamark.connector.arrow.predicates import bind_exactly
from seamark.connector.client.errors import ClientError, Refused
from seamark.connector.client.values import At
from seamark.connector.plans.conditions import all_of, drop_functions, limit_text, write_sql
from seamark.connector.read.tables import OpenTable, open_table
from seamark.connector.spark.frames.writes import WriteReport
from seamark.connector.spark.query.catalyst import Catalyst, Node
from seamark.connector.spark.query.conditions import Conditions, SparkColumn, find_spark_kind
from seamark.connector.spark.query.queries import run_text
from seamark.connector.spark.statements.candidate_rows import (
    DEFAULT_LIMITS,
    CandidateRows,
    StatementLimits,
    locate_by_filter,
    locate_by_keys,
)
from seamark.connector.spark.statements.collected_rows import CollectedRows, collect_rows, find_ordinals
from seamark.connector.spark.statements.key_values import (
    KeyValues,
    find_condition_keys,
    find_join_keys,
    select_fitting_rows,
)
from seamark.connector.spark.statements.overwrites import INSERT, OverwriteStatement
from seamark.connector.spark.statements.plan_nodes import PlanBuilder
from seamark.connector.spark.statements.row_changes import ChangedRows, ChangeQuery, build_deletion, write_changes
from seamark.connector.spark.statements.row_statements import (
    DELETE,
    KINDS,
    MERGE,
    UPDATE,
    RowStatement,
    RowStatementReader,
)
from seamark.connector.spark.statements.targets import MustRunInIceberg, StatementTarget, make_commit_summary
from seamark.connector.write.latest_rows import find_latest_rows
from seamark.connector.write.row_changes import COMMIT_ATTEMPTS_MAX, Report, RowChange, commit_row_change
from seamark.connector.write.row_locations import BatchKeys, find_record_index, select_indexed_fields
from seamark.connector.write.target import WriteTarget, create_target
from seamark.connector.write.upserts import COPY_ON_WRITE, MODES, read_scope
from seamark.formats.iceberg.expressions.expression import Expression

LOCATED, INDEXED, ICEBERG = "located", "indexed", "iceberg"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExecutedStatement:
    """The result of a statement, and the way in which it ran.

    Attributes:
        path: `located` (Seamark changes the rows that it has located), `indexed` (an INSERT OVERWRITE by Seamark's
            writers) or `iceberg` (Spark runs the statement with Iceberg).
        reason: The reason why this path was chosen.
        report: The changes that Seamark made, or None.
        frame: The result of the statement.
    """

    path: str
    reason: str
    report: Report | WriteReport | None
    frame: DataFrame


@dataclass(frozen=True)
class StatementExplanation:
    """The way in which a statement would run.

    Attributes:
        path: `located` (Seamark changes the rows that it has located), `indexed` (an INSERT OVERWRITE by Seamark's
            writers) or `iceberg` (Spark runs the statement with Iceberg).
        reason: The reason for this path.
    """

    path: str
    reason: str
    keys: tuple[str, ...] = ()
    """The columns whose values locate the rows."""
    index: str | None = None
    """The record index that locates the rows."""
    mode: str | None = None
    """`merge-on-read` or `copy-on-write`."""


def execute(
    spark: SparkSession,
    text: str,
    args: Mapping[str, Any] | Sequence[Any] | None = None,
    limits: StatementLimits = DEFAULT_LIMITS,
) -> ExecutedStatement:
    """Run a statement once.

    If Spark refuses the statement, or the statement fails, the error is Spark's error. If other writers cause a
    conflict in every attempt, or if the outcome of the commit is unknown, the error is one of
    `seamark.connector.client.errors`.
    """
    try:
        statement = _prepare(spark, text, args, limits)
        report = statement.commit()
    except _LeftToIceberg as error:
        _log.info("iceberg; %s", error)
        return ExecutedStatement(ICEBERG, str(error), None, run_text(spark, text, args))
    _log.info("%s; %s; %s", statement.path, statement.reason, report)
    statement.target.refresh(spark)
    return ExecutedStatement(statement.path, statement.reason, report, PlanBuilder(spark).build_empty_frame())


def explain(
    spark: SparkSession,
    text: str,
    args: Mapping[str, Any] | Sequence[Any] | None = None,
    limits: StatementLimits = DEFAULT_LIMITS,
) -> StatementExplanation:
    """Return the way in which `execute` would run a statement.

    The function changes nothing and evaluates no rows.
    """
    try:
        return _prepare(spark, text, args, limits).plan()
    except _LeftToIceberg as error:
        return StatementExplanation(ICEBERG, str(error))


def is_change(catalyst: Catalyst, statement: Node) -> bool:
    """Return whether `execute` may run a parsed statement in its own way: a row change or an INSERT OVERWRITE."""
    kind = catalyst.find_kind(statement)
    return kind in KINDS or (kind == INSERT and bool(statement.overwrite()))


def _prepare(spark: SparkSession, text: str, args: Any, limits: StatementLimits) -> _Statement:
    with _leave_errors_to_iceberg():
        if args:
            raise MustRunInIceberg("the statement has parameters")
        catalyst = Catalyst(spark)
        statement = catalyst.parse(text)
        if not is_change(catalyst, statement):
            raise MustRunInIceberg("the statement is not a MERGE, UPDATE, DELETE or INSERT OVERWRITE")
        return (
            _Overwrite(spark, statement)
            if catalyst.find_kind(statement) == INSERT
            else _LocatedStatement(spark, statement, limits)
        )


class _LeftToIceberg(Exception):
    """Raised if Seamark leaves the statement to Iceberg. The message is the reason, and nothing was committed."""


class _Statement(Protocol):
    """A statement that Seamark can run.

    Its methods raise `_LeftToIceberg` for every error before a commit. Then Iceberg runs the statement.

    Attributes:
        path: The way in which the statement runs, as in `StatementExplanation`.
        reason: The reason for this path.
    """

    path: str
    reason: str

    @property
    def target(self) -> StatementTarget: ...

    def plan(self) -> StatementExplanation: ...

    def commit(self) -> Report | WriteReport: ...


class _Overwrite:
    """An INSERT OVERWRITE that Seamark's writers run."""

    path = INDEXED
    """The way in which the statement runs, as `ExecutedStatement.path` reports it."""
    reason = "Seamark's writers build the table's index files"

    def __init__(self, spark: SparkSession, statement: Node) -> None:
        self._statement = OverwriteStatement(spark, statement)
        self.target = self._statement.target
        self._client = self.target.open_client(spark)

    def plan(self) -> StatementExplanation:
        with _leave_errors_to_iceberg():
            self._read_options()
            return StatementExplanation(INDEXED, self.reason)

    def commit(self) -> WriteReport:
        """Write the rows and commit them.

        If certainly nothing was committed, an error is raised as `_LeftToIceberg`, so that Iceberg runs the statement.
        A refusal is raised unchanged if an earlier attempt of the same commit may have been successful.
        """
        with _leave_errors_to_iceberg():
            options = self._read_options()
        try:
            return self._statement.write(self._client, options)
        except Refused as error:
            if error.has_unknown_earlier_outcome:
                raise
            raise _LeftToIceberg(str(error)) from error
        except (PySparkException, Py4JError, Unwritable) as error:
            # Tasks raise this error, so it occurs before the commit.
            raise _LeftToIceberg(_summarize(error)) from error

    def _read_options(self) -> Mapping[str, Any]:
        source_table = open_table(self._client, self._statement.target.levels, At())
        return self._statement.make_options(source_table)


class _LocatedStatement:
    """A MERGE, UPDATE or DELETE on located rows."""

    path = LOCATED

    def __init__(self, spark: SparkSession, statement: Node, limits: StatementLimits) -> None:
        self._spark, self._limits = spark, limits
        self._catalyst, self._builder = Catalyst(spark), PlanBuilder(spark)
        self.reason = ""
        self._source: CollectedRows | None = None
        """The evaluated rows of the source of a MERGE, or None."""
        self._subqueries: list[tuple[Node, CollectedRows]] = []
        """The parts of the condition with a subquery, each with the evaluated rows of the subquery."""
        self._inserted = False
        self._statement: RowStatement = RowStatementReader(spark).read(statement)
        self._query = ChangeQuery(spark, self._statement)
        self._client = self.target.open_client(spark)

    @property
    def target(self) -> StatementTarget:
        return self._statement.target

    def plan(self) -> StatementExplanation:
        with _leave_errors_to_iceberg():
            source_table = open_table(self._client, self.target.levels, At())
            mode = self._check_target_and_read_mode(
                source_table, create_target(source_table.metadata, source_table.storage, source_table.name)
            )
            keys_or_filter = self._find_keys_or_filter(source_table)
            if isinstance(keys_or_filter, KeyValues):
                index = self._find_index_columns(source_table, keys_or_filter)
                keys = keys_or_filter.names if index is None else tuple(index)
                return StatementExplanation(
                    LOCATED, self.reason, keys, self._choose_index_name(source_table, keys), mode
                )
            return StatementExplanation(LOCATED, self.reason, mode=mode)

    def commit(self) -> Report:
        with _leave_errors_to_iceberg():
            self._evaluate()

        def prepare(source_table: OpenTable, target: WriteTarget) -> RowChange:
            with _leave_errors_to_iceberg():
                return self._prepare(source_table, target)

        return commit_row_change(
            self._client,
            self.target.levels,
            prepare,
            branch="main",
            producer=None,
            summary=make_commit_summary(self._spark),
            attempts=COMMIT_ATTEMPTS_MAX,
        )

    # Preparation

    def _evaluate(self) -> None:
        """Evaluate the source of a MERGE, or the subqueries of a condition, so that later steps use the same rows.

        If Spark keeps the rows of a subquery, or if the subquery is not deterministic, its rows also replace it in the
        query. Otherwise, it can be run again with the same result.
        """
        source, condition = self._statement.source, self._statement.condition
        if source is not None:
            self._source = self._collect(source, "source")
            return
        self._subqueries = [
            (part, self._collect(part.query().plan(), "subquery"))
            for part in self._catalyst.list_operands(condition, "And")
            if self._catalyst.find_kind(part) == "InSubquery" and part.query().outerAttrs().isEmpty()
        ]
        if any(rows.table is None or not part.query().plan().deterministic() for part, rows in self._subqueries):
            self._insert_subqueries()

    def _collect(self, plan: Node, role: str) -> CollectedRows:
        return collect_rows(self._catalyst, self._builder, plan, role, self._limits.rows)

    def _insert_subqueries(self) -> None:
        """Replace the subqueries of the condition by their evaluated rows. Further calls do nothing."""
        if self._subqueries and not self._inserted:
            replacements = [(part, self._builder.with_subquery(part, rows.plan)) for part, rows in self._subqueries]
            self._statement = self._statement.with_parts(self._builder, replacements)
            self._query = ChangeQuery(self._spark, self._statement)
            self._inserted = True

    def _prepare(self, source_table: OpenTable, target: WriteTarget) -> RowChange:
        """Locate the rows, compute the changes and write their files.

        The rows are located by keys or by a filter. If the condition is true for exactly the rows with the keys, no
        condition is evaluated on them, and a DELETE reads no columns. Otherwise, Spark runs the query on these rows.
        """
        mode = self._check_target_and_read_mode(source_table, target)
        keys_or_filter = self._find_keys_or_filter(source_table)
        if isinstance(keys_or_filter, KeyValues):
            key_columns = self._find_index_columns(source_table, keys_or_filter) or list(keys_or_filter.names)
            values = self._evaluate_keys(keys_or_filter, key_columns)
            keys = self._make_batch_keys(source_table, keys_or_filter, values, key_columns)
            scope = read_scope(keys, source_table)
            is_exact_key = keys_or_filter.is_exact and len(key_columns) == len(keys_or_filter.names)
            names = (
                [] if is_exact_key and self._statement.kind == DELETE else self._query.list_names(source_table.schema)
            )
            candidates = locate_by_keys(self._client, source_table, keys, names, self._limits)
            changes = (
                self._compute_exact_changes(candidates, source_table, keys_or_filter, keys, values)
                if is_exact_key
                else None
            )
        else:
            scope, changes = keys_or_filter, None
            names = self._query.list_names(source_table.schema)
            candidates = locate_by_filter(self._client, source_table, keys_or_filter, names, self._limits)
        if changes is None:
            changes = self._query.run(candidates, source_table, self._insert_evaluated_rows())
        return write_changes(self._spark, changes, candidates, scope, source_table, target, mode)

    def _compute_exact_changes(
        self,
        candidates: CandidateRows,
        source_table: OpenTable,
        key_values: KeyValues,
        keys: BatchKeys,
        values: pa.Table,
    ) -> ChangedRows | None:
        """Compute the changes of a statement whose condition is true for exactly the located rows.

        Return None if Spark has to compute the join of a MERGE.
        """
        if self._statement.kind == DELETE:
            return build_deletion(candidates)
        if self._statement.kind == UPDATE:
            return self._query.run_on_all(candidates, source_table)
        if self._source is None or not all(number in self._source.columns for number in key_values.attribute_ids):
            return None
        ordinals = find_ordinals(keys, values, key_values.columns)
        return self._query.run_on_pairs(candidates, source_table, self._source, ordinals, self._limits.rows)

    def _insert_evaluated_rows(self) -> list[tuple[Node, Node]]:
        """Put evaluated rows in place of the subqueries, or return a replacement for the source of a MERGE.

        Returns:
            A pair of the source of a MERGE and a node with its evaluated rows. The list is empty for other statements.
        """
        if self._source is not None:
            return [(self._statement.source, self._source.plan)]
        self._insert_subqueries()
        return []

    def _check_target_and_read_mode(self, source_table: OpenTable, target: WriteTarget) -> str:
        """Check that the statement can change the table, and return the mode that the table's properties set.

        Raises:
            MustRunInIceberg: The table was altered, or the mode is unknown.
        """
        self.target.check(source_table)
        properties = source_table.metadata.properties
        mode = properties.get(f"write.{self._statement.kind.lower()}.mode", COPY_ON_WRITE).lower()
        if mode not in MODES:
            raise MustRunInIceberg(f"write.{self._statement.kind.lower()}.mode is {mode!r}")
        return mode

    def _find_keys_or_filter(self, source_table: OpenTable) -> KeyValues | Expression:
        """Return the keys or the filter that select the stored rows that the statement can change.

        A MERGE needs keys from its ON clause. Other statements use the first of these that exists: keys with a record
        index, a filter that the server plans, and keys without an index.

        Raises:
            MustRunInIceberg: The condition gives neither keys nor a filter.
        """
        columns = self._match_columns(source_table)
        condition = self._statement.condition
        if self._statement.kind == MERGE:
            key_values = find_join_keys(
                self._catalyst, self._builder, condition, columns, self._list_source_ids(), self._read_source_plan
            )
            if key_values is None:
                raise MustRunInIceberg(
                    "the ON clause does not compare a column of the table for equality with a value of the source"
                )
            return self._set_reason(source_table, key_values)
        candidates = find_condition_keys(self._catalyst, self._builder, condition, columns)
        indexed_candidates = [
            candidate for candidate in candidates if self._find_index_columns(source_table, candidate)
        ]
        if indexed_candidates:
            return self._set_reason(source_table, indexed_candidates[0])
        part_conditions = [
            Conditions(self._catalyst).read(part, columns) for part in self._catalyst.list_operands(condition, "And")
        ]
        filter_text = limit_text(drop_functions(all_of(part_conditions)))
        if filter_text is not None:
            self.reason = "the server plans its condition"
            return bind_exactly(write_sql(filter_text), source_table.schema)
        if candidates:
            return self._set_reason(source_table, candidates[0])
        raise MustRunInIceberg("the condition does not restrict the rows that it can change")

    def _match_columns(self, source_table: OpenTable) -> dict[int, SparkColumn]:
        """Return the columns of the table that Spark compares as Iceberg does, by the ids of their attributes."""
        kinds = {
            field.name: find_spark_kind(field.type) for field in source_table.schema.fields if "." not in field.name
        }
        columns = {}
        for number, name in self._catalyst.list_attributes(self._statement.stored):
            kind = kinds.get(name)
            if kind is not None:
                columns[number] = SparkColumn(name, kind)
        return columns

    def _set_reason(self, source_table: OpenTable, key_values: KeyValues) -> KeyValues:
        """Set `reason` to a text that names the columns of a record index or of the keys, and return the keys."""
        index = self._find_index_columns(source_table, key_values)
        self.reason = (
            f"keys in {', '.join(key_values.names)}" if index is None else f"a record index on {', '.join(index)}"
        )
        return key_values

    def _find_index_columns(self, source_table: OpenTable, key_values: KeyValues) -> list[str] | None:
        """Return the key columns of a record index, all with key values, or None if there is no such index.

        If there are several, the index with the most columns is used.
        """
        by_name = {field.name: field for field in source_table.schema.fields}
        indexed_fields = select_indexed_fields(source_table.metadata, [by_name[name] for name in key_values.names])
        return None if indexed_fields is None else [field.name for field in indexed_fields]

    def _choose_index_name(self, source_table: OpenTable, names: Sequence[str]) -> str | None:
        by_name = {field.name: field for field in source_table.schema.fields}
        index = find_record_index(source_table.metadata, [by_name[name] for name in names])
        return None if index is None else index.name

    def _list_source_ids(self) -> Sequence[int]:
        if self._source is not None:
            return self._source.ids
        source = self._statement.source
        return [] if source is None else [number for number, _ in self._catalyst.list_attributes(source)]

    def _read_source_plan(self) -> Node:
        return self._statement.source if self._source is None else self._source.plan

    def _evaluate_keys(self, key_values: KeyValues, names: Sequence[str]) -> pa.Table:
        """Return the key values of these columns, possibly repeated.

        If all of them are columns of collected rows, they are in the order of these rows.
        """
        values_by_number: dict[int, pa.ChunkedArray] = {}
        for rows in (self._source, *(rows for _, rows in self._subqueries)):
            values_by_number |= {} if rows is None else rows.columns
        columns = {
            name: values_by_number[number]
            for name, number in zip(key_values.names, key_values.attribute_ids, strict=True)
            if number is not None and number in values_by_number
        }
        if all(name in columns for name in names):
            return pa.table({name: columns[name] for name in names})
        return self._builder.frame(key_values.plan).select(*(f"`{name}`" for name in names)).distinct().toArrow()

    def _make_batch_keys(
        self, source_table: OpenTable, key_values: KeyValues, values: pa.Table, names: Sequence[str]
    ) -> BatchKeys:
        columns = [column for column in key_values.columns if column.name in names]
        fitting_rows = select_fitting_rows(values, columns).combine_chunks()
        return find_latest_rows(fitting_rows.to_batches(), source_table.schema, names).keys


class _leave_errors_to_iceberg:  # noqa: N801
    """A context manager that raises each error of its block as `_LeftToIceberg`.

    The block runs before the commit, so nothing was changed. Iceberg then runs the statement. The rows of a statement
    are located if their files and positions are known.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None or isinstance(error, _LeftToIceberg) or not isinstance(error, Exception):
            return
        if isinstance(error, MustRunInIceberg):
            raise _LeftToIceberg(str(error)) from None
        if isinstance(error, PySparkException | Py4JError):
            raise _LeftToIceberg(f"Spark refuses it on the located rows: {_summarize(error)}") from error
        if not isinstance(error, ClientError | ValueError):
            _log.warning(
                "The rows of the statement cannot be located, because of a bug; Iceberg runs it", exc_info=True
            )
        raise _LeftToIceberg(f"the rows cannot be located: {str(error)[:500]}") from error


def _summarize(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:500]
