"""Runs the query of a statement on the located rows, and writes the changes that the query returns.

Spark runs the query that its analyser has created for the statement. In this query, the located rows replace the table,
and the rows from which the keys were read replace the source. The result has a row for each change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import types as spark_types

from seamark.connector.arrow.arrays import Longs
from seamark.connector.read.lineage import ROW_ID_NAME, has_lineage
from seamark.connector.read.tables import OpenTable
from seamark.connector.spark.frames.file_changes import FileChanges
from seamark.connector.spark.query.catalyst import Catalyst, Node
from seamark.connector.spark.scala import to_list
from seamark.connector.spark.statements.candidate_rows import PLACE, CandidateRows
from seamark.connector.spark.statements.collected_rows import CollectedRows
from seamark.connector.spark.statements.plan_nodes import PlanBuilder
from seamark.connector.spark.statements.row_statements import RowStatement
from seamark.connector.spark.statements.targets import OPERATION
from seamark.connector.spark.types import convert_to_spark_type, find_spark_conversion
from seamark.connector.write.delete_files import WrittenDeletes
from seamark.connector.write.row_changes import Report, RowChange
from seamark.connector.write.table_writer import discard_on_error, write_batches
from seamark.connector.write.target import WriteTarget, with_lineage
from seamark.connector.write.upserts import COPY_ON_WRITE
from seamark.formats.iceberg.expressions.expression import Expression
from seamark.formats.iceberg.types.schema import Schema

_DELETE, _UPDATE, _INSERT, _REINSERT = 1, 2, 3, 4
_INNER, _RIGHT_OUTER, _LEFT_ANTI = "Inner", "RightOuter", "LeftAnti"
"""The types of the joins that Spark creates for a MERGE. The stored rows are on the left, except in an anti-join."""
_IS_STORED, _ROW = "is stored", "row"
"""The two columns that Spark adds to the stored rows in a join: a flag that the row exists, and the row's number."""


@dataclass(frozen=True)
class ChangedRows:
    """The rows that a statement deletes and adds.

    Attributes:
        deleted: The indexes of the deleted rows among the located rows, as int64. They may be repeated.
        new: The rows to add, with the table's columns. In a table with row lineage, they also have `_row_id`, which is
            not null for updated rows.
        updated: The number of updated rows.
    """

    deleted: Longs
    new: pa.Table
    updated: int


def find_needed_columns(catalyst: Catalyst, statement: RowStatement) -> list[str]:
    """Return the columns of the stored rows that expressions of the query use.

    The query returns all other columns unchanged.
    """
    used_ids: set[int] = set()
    remaining_nodes = [statement.query]
    while remaining_nodes:
        node = remaining_nodes.pop()
        if catalyst.find_kind(node) == "Project":
            for output in to_list(node.projectList()):
                used_ids |= (
                    frozenset()
                    if catalyst.find_kind(output) == "AttributeReference"
                    else catalyst.list_reference_ids(output)
                )
        else:
            used_ids |= catalyst.list_reference_ids(node)
        # The source of a MERGE has no stored row, so only the other side of the join is searched. If the MERGE only
        # appends rows, Spark joins the source as the left side with the stored rows, otherwise as the right side.
        if statement.join is not None and node.fastEquals(statement.join):
            remaining_nodes.append(node.right() if statement.appends else node.left())
        else:
            remaining_nodes += catalyst.list_children(node)
    return [name for number, name in catalyst.list_attributes(statement.stored) if number in used_ids]


class ChangeQuery:
    """Runs the query of one statement on located rows."""

    def __init__(self, spark: SparkSession, statement: RowStatement) -> None:
        self._spark = spark
        self._statement = statement
        self._catalyst, self._builder = Catalyst(spark), PlanBuilder(spark)

    @cached_property
    def _needed_names(self) -> list[str]:
        return find_needed_columns(self._catalyst, self._statement)

    def list_names(self, schema: Schema) -> list[str]:
        """Return the columns of the stored rows that the query needs: columns of the table, and `_row_id`."""
        column_names = {field.name for field in schema.fields} | {ROW_ID_NAME}
        return [name for name in self._needed_names if name in column_names]

    def run(
        self, candidates: CandidateRows, source_table: OpenTable, replacements: Sequence[tuple[Node, Node]]
    ) -> ChangedRows:
        """Run the query on located rows. If the statement fails, the error is Spark's error.

        Args:
            candidates: The located rows, which replace all stored rows in the query.
            source_table: The table.
            replacements: Further nodes of the query to replace, as pairs of the old node and the new node.
        """
        return self._run_query(
            source_table, [(self._statement.stored, self._build_located_plan(candidates, source_table)), *replacements]
        )

    def run_on_all(self, candidates: CandidateRows, source_table: OpenTable) -> ChangedRows:
        """Run an UPDATE whose condition is true for all located rows.

        The plan of the located rows replaces the filter node, so that Spark does not evaluate the condition.
        """
        filter_node = self._statement.filter
        assert filter_node is not None
        rows = self._builder.replace_nodes(
            filter_node.child(), [(self._statement.stored, self._build_located_plan(candidates, source_table))]
        )
        return self._run_query(source_table, [(filter_node, rows)])

    def run_on_pairs(
        self, candidates: CandidateRows, source_table: OpenTable, source: CollectedRows, keys: Longs, pairs_max: int
    ) -> ChangedRows | None:
        """Run a MERGE without its join. Its ON must be true for exactly the pairs of rows with equal keys.

        Args:
            candidates: The located rows, with the index of the key of each row.
            source_table: The table.
            source: The rows of the source, which the driver has collected.
            pairs_max: The maximum number of pairs.
            keys: The index of the key of each source row, as int64[rows]. It is -1 if a row has no key.

        Returns:
            The changes. None if the join has an unknown form, if there are more than `pairs_max` pairs, or if a
            stored row is in several pairs. Spark must report such a row, but finds it only if its join has put the
            pairs of the row into one partition.
        """
        join = self._statement.join
        if join is None or candidates.keys is None or source.table is None:
            return None
        kind = str(join.joinType().toString())
        # Spark adds columns to the stored rows, by which it recognises rows of the join that have a stored row.
        added_columns = self._find_added_columns(join, kind)
        pairs = match_rows(candidates.keys, keys, pairs_max)
        if added_columns is None or pairs is None or len(np.unique(pairs[0])) < len(pairs[0]):
            return None
        stored_rows, source_rows = join_rows(kind, pairs, np.flatnonzero(~np.isin(keys, candidates.keys)))
        stored_values = candidates.values.take(pa.array(stored_rows, mask=stored_rows < 0))
        matched_source = source.table.take(pa.array(source_rows))
        fields, columns = self._convert_for_spark(stored_values, source_table.schema)
        # The last column is true if the row of the join has a stored row, and otherwise null.
        stored_columns = [*columns, pa.array(stored_rows >= 0, mask=stored_rows < 0)]
        joined_rows = self._join_side_by_side(join, fields, stored_columns, source, matched_source, added_columns)
        return self._run_query(source_table, [(join, joined_rows)])

    def _join_side_by_side(
        self,
        join: Node,
        fields: Sequence[spark_types.StructField],
        stored_columns: Sequence[Any],
        source: CollectedRows,
        source_rows: pa.Table,
        added_columns: Mapping[int, str],
    ) -> Node:
        """Return the rows of the join: columns of the stored rows, then columns of the source.

        Spark adds two columns to the stored rows in its own join. The result has them too. The driver has already
        matched the rows, so row r of the stored columns belongs to row r of the source.

        Args:
            join: The join of the query, whose attributes the result has.
            fields: The fields of the stored columns.
            stored_columns: The columns of the stored rows, and a last column that is true for a stored row.
            source: The collected source, for its attributes.
            source_rows: The matched rows of the source.
            added_columns: The columns that Spark adds, by the ids of their attributes: `_IS_STORED` or `_ROW`.
        """
        kinds = [field.dataType for field in fields] + [spark_types.BooleanType()]
        kinds += [field.dataType for field in source.schema.fields]
        names = [f"c{number}" for number in range(len(kinds))]
        local = self._builder.build_local_rows(
            pa.table([*stored_columns, *source_rows.columns], names=names),
            spark_types.StructType(list(map(spark_types.StructField, names, kinds))),
        )
        outputs = to_list(local.output())
        by_name = {field.name: output for field, output in zip(fields, outputs, strict=False)}
        by_id = self._key_by_id(by_name) | dict(zip(source.ids, outputs[len(fields) + 1 :], strict=True))
        for attribute_id, added_column in added_columns.items():
            by_id[attribute_id] = by_name[PLACE] if added_column == _ROW else outputs[len(fields)]
        return self._project_to_attributes(join, local, by_id)

    def _find_added_columns(self, join: Node, kind: str) -> dict[int, str] | None:
        """Return the columns that Spark adds to the stored rows in the join of a MERGE, by the ids of their attributes.

        Such a column is true for each stored row (`_IS_STORED`), or it is the number of the row (`_ROW`). Return None
        if the join has an unknown form.
        """
        if kind in (_INNER, _RIGHT_OUTER):
            return self._read_added_columns(join.left())
        return {} if kind == _LEFT_ANTI and self._is_stored(join.right()) else None

    def _read_added_columns(self, side: Node) -> dict[int, str] | None:
        """Return the columns that Spark adds to the stored rows on one side of a join, by the ids of their attributes.

        Such a column is true for each stored row (`_IS_STORED`), or it is the number of the row (`_ROW`). Return None
        if the side has a further column, or a filter with a part of the ON.
        """
        if self._catalyst.find_kind(side) != "Project" or not self._is_stored(side.child()):
            return None
        stored_ids = {number for number, _ in self._catalyst.list_attributes(self._statement.stored)}
        added_columns = {}
        for place, (number, _) in enumerate(self._catalyst.list_attributes(side)):
            if number in stored_ids:
                continue
            output = side.projectList().apply(place)
            if self._catalyst.find_kind(output) != "Alias":
                return None
            if self._is_true(output.child()):
                added_columns[number] = _IS_STORED
            elif self._catalyst.find_kind(output.child()) == "MonotonicallyIncreasingID":
                added_columns[number] = _ROW
            else:
                return None
        return added_columns

    def _is_stored(self, node: Node) -> bool:
        """Return whether the node returns all stored rows. Spark may add a filter that is always true."""
        if self._catalyst.find_kind(node) == "Filter" and self._is_true(node.condition()):
            node = node.child()
        return bool(node.fastEquals(self._statement.stored))

    def _is_true(self, expression: Node) -> bool:
        return self._catalyst.find_kind(expression) == "Literal" and expression.value() is True

    def _build_located_plan(self, candidates: CandidateRows, source_table: OpenTable) -> Node:
        """Return a Spark plan with the located rows. Its attributes have the ids of the leaf with the stored rows."""
        fields, columns = self._convert_for_spark(candidates.values, source_table.schema)
        plan = self._builder.build_local_rows(
            pa.table(columns, names=[field.name for field in fields]), spark_types.StructType(fields)
        )
        by_name = dict(zip((field.name for field in fields), to_list(plan.output()), strict=True))
        return self._project_to_attributes(self._statement.stored, plan, self._key_by_id(by_name))

    def _key_by_id(self, by_name: Mapping[str, Node]) -> dict[int, Node]:
        """Return the nodes by the ids of the stored rows' attributes.

        Args:
            by_name: The nodes by the names of these attributes.
        """
        attributes = self._catalyst.list_attributes(self._statement.stored)
        return {number: by_name[name] for number, name in attributes if name in by_name}

    def _run_query(self, source_table: OpenTable, replacements: Sequence[tuple[Node, Node]]) -> ChangedRows:
        """Run the query with these nodes replaced, and return the changes in its result.

        The result has a row for each change, with the operation in a column. If the query only appends rows, it has no
        such column, and all its rows are new. An update of a row is one change, which deletes the old row and adds the
        new row, or two changes: `_DELETE` and `_REINSERT`. The column `PLACE` has the index of the old row among the
        located rows.

        Args:
            source_table: The table.
            replacements: Pairs of a node of the query and its replacement.

        Raises:
            ValueError: The result has an unknown operation.
        """
        query = self._builder.replace_nodes(self._statement.query, replacements)
        names = [field.name for field in source_table.schema.fields]
        if self._statement.appends:
            appended_rows = self._builder.frame(query).toArrow().rename_columns(names)
            return ChangedRows(deleted=np.zeros(0, dtype=np.int64), new=appended_rows, updated=0)
        outputs = {name: place for place, (_, name) in enumerate(self._catalyst.list_attributes(query))}
        output_names = [OPERATION, *(name for name in (*names, PLACE, ROW_ID_NAME) if name in outputs)]
        output = query.output()
        plan = self._builder.project([output.apply(outputs[name]) for name in output_names], query)
        result = self._builder.frame(plan).toArrow()
        operation = result[OPERATION].to_numpy()
        deletes = np.isin(operation, (_DELETE, _UPDATE))
        adds = np.isin(operation, (_UPDATE, _INSERT, _REINSERT))
        if not (deletes | adds).all():
            raise ValueError(f"Spark's query returned an unknown operation: {sorted(set(operation.tolist()))}")
        new_names = [name for name in (*names, ROW_ID_NAME) if name in outputs]
        added_rows = result.select(new_names).filter(pa.array(adds)) if adds.any() else result.select([]).slice(0, 0)
        return ChangedRows(
            deleted=result[PLACE].filter(pa.array(deletes)).to_numpy().astype(np.int64),
            new=added_rows,
            updated=int(np.count_nonzero(operation == _REINSERT) + np.count_nonzero(operation == _UPDATE)),
        )

    def _convert_for_spark(self, values: pa.Table, schema: Schema) -> tuple[list[spark_types.StructField], list[Any]]:
        """Return the fields and the columns of stored rows, with the types that Spark needs.

        Columns that the table does not have, such as `PLACE` and `_row_id`, are 64-bit integers.
        """
        by_name = {field.name: field for field in schema.fields}
        fields, columns = [], []
        for name in values.column_names:
            field = by_name.get(name)
            kind = spark_types.LongType() if field is None else convert_to_spark_type(field.type)
            convert = None if field is None else find_spark_conversion(field.type)
            column = values[name] if convert is None else convert(values[name].combine_chunks())
            fields.append(spark_types.StructField(name, kind))
            columns.append(column)
        return fields, columns

    def _project_to_attributes(self, node: Node, plan: Node, by_id: Mapping[int, Node]) -> Node:
        """Return the rows of a plan with the attributes of a node.

        An attribute without an output in `by_id` is not used by the query, and gets a default value.

        Args:
            node: The node.
            plan: The plan.
            by_id: The outputs of the plan, by the ids of the attributes of `node`.
        """
        attributes = node.output()
        outputs = []
        for place, (number, name) in enumerate(self._catalyst.list_attributes(node)):
            attribute = attributes.apply(place)
            value = by_id[number] if number in by_id else self._builder.build_default(attribute.dataType())
            outputs.append(self._builder.as_attribute(value, attribute, name))
        return self._builder.project(outputs, plan)


def build_deletion(candidates: CandidateRows) -> ChangedRows:
    """Return the changes of a DELETE whose condition is true for all located rows."""
    return ChangedRows(deleted=np.arange(len(candidates.positions)), new=pa.table({}), updated=0)


def match_rows(stored_ordinals: Longs, source: Longs, pairs_max: int) -> tuple[Longs, Longs] | None:
    """Return the pairs of a stored row and a source row with equal keys. A key of -1 is not equal to any key.

    Args:
        stored_ordinals: The index of each stored row's key.
        source: The index of each source row's key.
        pairs_max: The maximum number of pairs.

    Returns:
        The positions of the paired rows in `stored_ordinals` and in `source`, each as int64[pairs]. None if there are
        more than `pairs_max` pairs.
    """
    order = np.argsort(stored_ordinals, kind="stable")
    sorted_ordinals = stored_ordinals[order]
    first_positions = np.searchsorted(sorted_ordinals, source, "left")
    counts = np.searchsorted(sorted_ordinals, source, "right") - first_positions
    if (total := int(counts.sum())) > pairs_max:
        return None
    index_in_group = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    return order[np.repeat(first_positions, counts) + index_in_group], np.repeat(np.arange(len(source)), counts)


def join_rows(kind: str, pairs: tuple[Longs, Longs], unmatched: Longs) -> tuple[Longs, Longs]:
    """Return the positions of the stored rows and of the source rows in the result of a join.

    A position of -1 means that the source row has no stored row.

    Args:
        kind: The type of the join.
        pairs: The pairs of rows with equal keys.
        unmatched: The positions of the source rows without a stored row.
    """
    if kind == _INNER:
        return pairs
    no_rows = np.full(len(unmatched), -1, dtype=np.int64)
    if kind == _LEFT_ANTI:
        return no_rows, unmatched
    return np.concatenate([pairs[0], no_rows]), np.concatenate([pairs[1], unmatched])


def write_changes(
    spark: SparkSession,
    changes: ChangedRows,
    candidates: CandidateRows,
    scope: Expression,
    source_table: OpenTable,
    target: WriteTarget,
    mode: str,
) -> RowChange:
    """Write the files of a change. If an error occurs, delete the written files.

    An updated row is counted both as deleted and as new, so the report subtracts the updated rows from both.

    Args:
        spark: The session.
        changes: The deleted and the new rows.
        candidates: The located rows.
        scope: The filter of the rows that the change depends on. The commit fails if other writers have changed them.
        source_table: The table at the snapshot that was read.
        target: The table with the settings with which files are written.
        mode: `copy-on-write` or `merge-on-read`.
    """
    matched_files = candidates.group_by_file(changes.deleted)
    deleted_rows = sum(len(file.positions) for file in matched_files)
    new = changes.new
    has_row_ids = has_lineage(source_table.metadata) and changes.updated > 0
    if ROW_ID_NAME in new.column_names and not has_row_ids:
        new = new.drop_columns([ROW_ID_NAME])
    report = Report(
        inserted=len(new) - changes.updated,
        updated=changes.updated,
        deleted=deleted_rows - changes.updated,
        files_read=len(candidates.read),
    )
    files = FileChanges(spark, source_table, target)
    if mode == COPY_ON_WRITE:
        data = files.copy_files(matched_files, new.to_batches(), tracked=has_row_ids)
        read_paths = candidates.read | {file.task.path for file in matched_files if not file.is_whole}
        removed_files = tuple({"file-path": file.task.path} for file in matched_files)
        return RowChange(scope, replace(report, files_read=len(read_paths)), data, removed=removed_files)
    data = write_batches(with_lineage(target) if has_row_ids else target, new.to_batches())
    with discard_on_error([data], target.storage):
        deletes = files.mark_deleted(matched_files) if matched_files else WrittenDeletes()
    return RowChange(scope, report, data, deletes)
