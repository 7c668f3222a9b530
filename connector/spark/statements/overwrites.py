"""Runs INSERT OVERWRITE with Seamark's writers, which also build the table's index files.

Spark's analyser creates the query of the statement, with conversions and default values. It also decides which rows are
replaced: all rows, the rows of some partitions, or the partitions of the new rows
(`spark.sql.sources.partitionOverwriteMode`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark.sql import SparkSession

from seamark.connector.client.client import SeamarkClient
from seamark.connector.plans.conditions import ColumnComparison, write_sql
from seamark.connector.read.tables import OpenTable
from seamark.connector.spark.frames.writes import WriteReport, write
from seamark.connector.spark.query.catalyst import Catalyst, Node
from seamark.connector.spark.query.conditions import Conditions, SparkColumn, find_spark_kind
from seamark.connector.spark.scala import to_list
from seamark.connector.spark.statements.plan_nodes import PlanBuilder
from seamark.connector.spark.statements.targets import (
    MustRunInIceberg,
    StatementTarget,
    check_session,
    find_relation_target,
    find_target_relation,
    make_commit_summary,
    reads_table,
)
from seamark.connector.write.appends import OVERWRITE, OVERWRITE_PARTITIONS
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.index.definitions import read_definitions

INSERT = "InsertIntoStatement"
_EQUALITIES = ("=", "IS NOT DISTINCT FROM", "IS NULL")
_KINDS = ("OverwriteByExpression", "OverwritePartitionsDynamic")


class OverwriteStatement:
    """One INSERT OVERWRITE.

    Raises:
        MustRunInIceberg: Iceberg must run the statement.
    """

    def __init__(self, spark: SparkSession, statement: Node) -> None:
        check_session(spark)
        self._spark, self._catalyst, self._builder = spark, Catalyst(spark), PlanBuilder(spark)
        command = self._catalyst.analyze(statement)
        if self._catalyst.find_kind(command) not in _KINDS:
            raise MustRunInIceberg("Spark does not rewrite the statement to an overwrite of a table")
        if not command.writeOptions().isEmpty():
            raise MustRunInIceberg("the statement has write options")
        self._command = command
        self._relation = find_target_relation(spark, command.table())
        self.target: StatementTarget = find_relation_target(self._catalyst, self._relation)
        self.query: Node = command.query()
        if reads_table(self._catalyst, self.query, self.target):
            raise MustRunInIceberg("the statement also reads the table that it changes")

    def make_options(self, source_table: OpenTable) -> Mapping[str, Any]:
        """Return the arguments of `frames.writes.write`: the mode, and the filter of the rows to replace.

        Raises:
            MustRunInIceberg: Iceberg must run the statement.
        """
        self.target.check(source_table)
        if source_table.metadata.format_version == 1:
            raise MustRunInIceberg("the table has format version 1")
        if not read_definitions(source_table.metadata).enabled:
            raise MustRunInIceberg("the table has no index whose files Seamark's writers would build")
        if self._catalyst.find_kind(self._command) == "OverwritePartitionsDynamic":
            if len(source_table.metadata.partition_specs) > 1:
                raise MustRunInIceberg("the table's files may have several partition specs")
            return {"mode": OVERWRITE_PARTITIONS}
        return {"mode": OVERWRITE, "where": self._read_condition(source_table)}

    def _read_condition(self, source_table: OpenTable) -> str | bool:
        """Return the filter of the rows to replace as SQL, or True for all rows.

        Spark reads the PARTITION clause as a condition. It selects whole partitions only if it consists of equalities
        of identity partitions.

        Raises:
            MustRunInIceberg: The condition has another form.
        """
        condition = self._command.deleteExpr()
        if self._catalyst.find_kind(condition) == "Literal" and bool(condition.value()):
            return True
        spec = source_table.metadata.default_spec
        ids = {field.sources[0] for field in spec.fields if field.transform == IDENTITY}
        kinds = {field.name: find_spark_kind(field.type) for field in source_table.schema.fields if field.id in ids}
        columns = {
            number: SparkColumn(name, kind)
            for number, name in self._catalyst.list_attributes(self._relation)
            if (kind := kinds.get(name)) is not None
        }
        texts = []
        for part in self._catalyst.list_operands(condition, "And"):
            comparison = Conditions(self._catalyst).read(part, columns)
            # A condition that was read may be true for more rows than the part of the filter, but an equality is exact.
            if (
                not isinstance(comparison, ColumnComparison)
                or comparison.op not in _EQUALITIES
                or comparison.transform != IDENTITY
            ):
                raise MustRunInIceberg("the PARTITION clause is not an equality of identity partitions")
            texts.append(write_sql(comparison))
        return " AND ".join(texts)

    def write(self, client: SeamarkClient, options: Mapping[str, Any]) -> WriteReport:
        names = [str(attribute.name()) for attribute in to_list(self._relation.output())]
        outputs = [
            self._builder.name_output(output, name)
            for output, name in zip(to_list(self.query.output()), names, strict=True)
        ]
        frame = self._builder.frame(self._builder.project(outputs, self.query))
        report: WriteReport = write(
            frame, self.target.levels, client=client, summary=make_commit_summary(self._spark), **options
        )
        return report
