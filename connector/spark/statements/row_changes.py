"""Runs a statement's query on the located rows, and writes the changes that it returns.

Spark runs the query that its analyser made of the statement, with the located rows in the place of the table, and with
the source's rows as they were when their keys were read. The result has a row for each change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import types as spark_types

from seamark.connector.read.lineage import ROW_ID_NAME, has_lineage
from seamark.connector.read.tables import OpenTable
from seamark.connector.spark.frames.file_changes import FileChanges
from seamark.connector.spark.query.catalyst import Catalyst, Node
from seamark.connector.spark.scala import items
from seamark.connector.spark.statements.located_rows import PLACE, LocatedRows
from seamark.connector.spark.statements.plan_nodes import PlanBuilder
from seamark.connector.spark.statements.row_statements import RowStatement
from seamark.connector.spark.statements.targets import OPERATION
from seamark.connector.spark.types import for_spark, spark_type
from seamark.connector.write.delete_files import WrittenDeletes
from seamark.connector.write.row_changes import Report, RowChange
from seamark.connector.write.table_writer import write_batches
from seamark.connector.write.target import WriteTarget, with_lineage
from seamark.connector.write.upserts import COPY_ON_WRITE
from seamark.metaserver.iceberg.expressions.expression import Expression
from seamark.metaserver.iceberg.types.schema import Schema

_DELETE, _UPDATE, _INSERT, _REINSERT = 1, 2, 3, 4
Longs = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Changes:
    """`deleted`: numbers of located rows, int64, possibly repeated. `new`: rows to add, with the table's columns, and
    in a table with row lineage with `_row_id`, not null for updated rows."""

    deleted: Longs
    new: pa.Table
    updated: int


def needed_columns(catalyst: Catalyst, statement: RowStatement) -> list[Node]:
    """The attributes of the stored rows that the query's expressions use; others only pass through it."""
    used: set[int] = set()
    left = [statement.query]
    while left:
        node = left.pop()
        for expression in items(node.expressions()):
            if catalyst.kind(expression) == "AttributeReference" and catalyst.kind(node) == "Project":
                continue
            used |= {catalyst.id_of(one) for one in items(expression.references().toSeq())}
        left += items(node.children())
    return [one for one in items(statement.stored.output()) if catalyst.id_of(one) in used]


class ChangeQuery:
    """The query of one statement, ready to be run on located rows."""

    def __init__(self, spark: SparkSession, statement: RowStatement) -> None:
        self._spark = spark
        self._statement = statement
        self._catalyst, self._build = Catalyst(spark), PlanBuilder(spark)
        self._needed = [str(one.name()) for one in needed_columns(self._catalyst, statement)]

    def names(self, schema: Schema) -> list[str]:
        """The columns of the table, and `_row_id`, that the query needs of the stored rows."""
        known = {field.name for field in schema.fields} | {ROW_ID_NAME}
        return [name for name in self._needed if name in known]

    def run(self, located: LocatedRows, opened: OpenTable, more: Sequence[tuple[Node, Node]]) -> Changes:
        """`more`: other nodes of the query that are replaced, with their new nodes. Spark's error if the statement
        fails."""
        stored = self._in_place_of(self._statement.stored, self._local(located.values, opened.schema))
        query = self._build.replaced(self._statement.query, [(self._statement.stored, stored), *more])
        outputs = {str(one.name()): one for one in items(query.output())}
        names = [field.name for field in opened.schema.fields]
        if self._statement.appends:
            new = self._selected(query, list(zip(items(query.output()), names, strict=True)))
            return Changes(np.zeros(0, dtype=np.int64), new, 0)
        wanted = [OPERATION, *(name for name in (*names, PLACE, ROW_ID_NAME) if name in outputs)]
        found = self._selected(query, [(outputs[name], name) for name in wanted])
        operation = found[OPERATION].to_numpy()
        deletes = np.isin(operation, (_DELETE, _UPDATE))
        adds = np.isin(operation, (_UPDATE, _INSERT, _REINSERT))
        if not (deletes | adds).all():
            raise ValueError(f"Spark's query has an operation that is not known: {sorted(set(operation.tolist()))}")
        new_names = [name for name in (*names, ROW_ID_NAME) if name in outputs]
        new = found.select(new_names).filter(pa.array(adds)) if adds.any() else found.select([]).slice(0, 0)
        return Changes(
            found[PLACE].filter(pa.array(deletes)).to_numpy().astype(np.int64),
            new,
            int(np.count_nonzero(operation == _REINSERT) + np.count_nonzero(operation == _UPDATE)),
        )

    def _local(self, values: pa.Table, schema: Schema) -> Node:
        by_name = {field.name: field for field in schema.fields}
        fields, columns = [], []
        for name in values.column_names:
            field = by_name.get(name)
            kind = spark_types.LongType() if field is None else spark_type(field.type)
            convert = None if field is None else for_spark(field.type)
            column = values[name] if convert is None else convert(values[name].combine_chunks())
            fields.append(spark_types.StructField(name, kind))
            columns.append(column)
        return self._build.local(pa.table(columns, names=values.column_names), spark_types.StructType(fields))

    def _in_place_of(self, stored: Node, plan: Node) -> Node:
        """The rows with the attributes of the stored rows. An attribute that the query does not use has any value."""
        given = {str(one.name()): one for one in items(plan.output())}
        return self._build.project(
            [
                self._build.as_attribute(
                    given[name] if (name := str(one.name())) in given else self._build.default(one.dataType()), one
                )
                for one in items(stored.output())
            ],
            plan,
        )

    def _selected(self, query: Node, outputs: Sequence[tuple[Node, str]]) -> pa.Table:
        plan = self._build.project([self._build.named(output, name) for output, name in outputs], query)
        return self._build.frame(plan).toArrow()


def write_changes(
    spark: SparkSession,
    changes: Changes,
    located: LocatedRows,
    scope: Expression,
    opened: OpenTable,
    target: WriteTarget,
    mode: str,
) -> RowChange:
    """Writes the files of the change. Files are deleted on an error."""
    matched = located.matched(changes.deleted)
    deleted = sum(len(file.positions) for file in matched)
    new = changes.new
    tracked = has_lineage(opened.metadata) and changes.updated > 0
    if ROW_ID_NAME in new.column_names and not tracked:
        new = new.drop_columns([ROW_ID_NAME])
    report = Report(
        inserted=len(new) - changes.updated,
        updated=changes.updated,
        deleted=deleted - changes.updated,
        files_read=len(located.read),
    )
    files = FileChanges(spark, opened, target)
    if mode == COPY_ON_WRITE:
        data = files.copied(matched, new.to_batches(), tracked=tracked)
        read = located.read | {file.task.path for file in matched if not file.is_whole}
        removed = tuple({"file-path": file.task.path} for file in matched)
        report = Report(report.inserted, report.updated, report.deleted, files_read=len(read))
        return RowChange(scope, report, data, removed=removed)
    data = write_batches(with_lineage(target) if tracked else target, new.to_batches())
    try:
        deletes = files.marked(matched) if matched else WrittenDeletes()
    except BaseException:
        data.discard(target.storage)
        raise
    return RowChange(scope, report, data, deletes)
