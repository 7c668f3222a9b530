"""Evaluates the rows that contain a statement's keys once: the source of a MERGE, and subqueries in a condition."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from pyspark.sql.types import StructType

from seamark.connector.arrow.arrays import Longs
from seamark.connector.spark.query.catalyst import Catalyst, Node
from seamark.connector.spark.query.conditions import SparkColumn
from seamark.connector.spark.scala import to_list
from seamark.connector.spark.statements.key_values import fits_column
from seamark.connector.spark.statements.plan_nodes import PlanBuilder
from seamark.connector.spark.statements.targets import MustRunInIceberg
from seamark.connector.write.latest_rows import read_column
from seamark.connector.write.row_locations import BatchKeys

_COLLECTED_TYPE = re.compile(
    r"boolean|tinyint|smallint|int|bigint|float|double|string|binary|date|timestamp|timestamp_ntz"
    r"|decimal\([0-9,]+\)|(?:struct|array|map)<(?!.*(?:collate|interval|variant)).*>",
    re.DOTALL,
)
"""Matches Spark's names of the types of columns that the driver can collect."""


@dataclass(frozen=True)
class CollectedRows:
    """The evaluated rows of a plan.

    Attributes:
        outputs: The attributes of the rows, as a Scala Seq.
        table: The columns in the order of `outputs`, with the types of `schema`. None if Spark has the rows.
        spark_plan: The plan of the rows in Spark, or None if the driver has the rows.
    """

    builder: PlanBuilder
    outputs: Node
    ids: tuple[int, ...]
    """The ids of the attributes."""
    names: tuple[str, ...]
    table: pa.Table | None
    schema: StructType
    spark_plan: Node | None = None

    @cached_property
    def plan(self) -> Node:
        """A plan that returns the evaluated rows with the same attributes."""
        if self.spark_plan is not None:
            return self.spark_plan
        assert self.table is not None
        local = self.builder.build_local_rows(self.table, self.schema)
        outputs = zip(to_list(local.output()), to_list(self.outputs), self.names, strict=True)
        return self.builder.project(
            [self.builder.as_attribute(output, attribute, name) for output, attribute, name in outputs], local
        )

    @property
    def columns(self) -> Mapping[int, pa.ChunkedArray]:
        """The columns by the ids of their attributes. Empty if Spark has the rows."""
        return {} if self.table is None else dict(zip(self.ids, self.table.columns, strict=True))


def collect_rows(catalyst: Catalyst, builder: PlanBuilder, plan: Node, role: str, rows_max: int) -> CollectedRows:
    """Evaluate a plan. Collect its rows on the driver if their types permit it. Otherwise, store them in Spark.

    Args:
        catalyst: Access to the plan.
        builder: Builds plans in the session.
        plan: The plan. Columns with equal names are renamed while it runs, because Arrow needs distinct names.
        role: The name that the error message uses for the rows.
        rows_max: The maximum number of rows. One more row is read, which shows whether there are more.

    Raises:
        MustRunInIceberg: There are more than `rows_max` rows.
    """
    attributes = catalyst.list_attributes(plan)
    ids, names = tuple(number for number, _ in attributes), tuple(name for _, name in attributes)
    limited_plan = builder.limit(rows_max + 1, plan)
    uniquely_named_plan = limited_plan
    if len(set(names)) < len(names):
        named_outputs = [
            builder.name_output(attribute, f"c{number}") for number, attribute in enumerate(to_list(plan.output()))
        ]
        uniquely_named_plan = builder.project(named_outputs, limited_plan)
    frame = builder.frame(uniquely_named_plan)
    if any(_COLLECTED_TYPE.fullmatch(field.dataType.simpleString()) is None for field in frame.schema.fields):
        frame = builder.frame(limited_plan).localCheckpoint()
        _check_count(frame.count(), role, rows_max)
        checkpointed_plan = frame._jdf.queryExecution().analyzed()
        return CollectedRows(builder, plan.output(), ids, names, None, frame.schema, checkpointed_plan)
    table = frame.toArrow()
    _check_count(len(table), role, rows_max)
    return CollectedRows(builder, plan.output(), ids, names, table, frame.schema)


def _check_count(rows: int, role: str, rows_max: int) -> None:
    if rows > rows_max:
        raise MustRunInIceberg(f"the {role} has more than {rows_max:,} rows")


def find_ordinals(keys: BatchKeys, values: pa.Table, columns: Iterable[SparkColumn]) -> Longs:
    """Return the index of the key that equals the values of each row, as int64[rows].

    It is -1 if no key is equal, for example because a value is null.
    """
    can_match = np.ones(len(values), dtype=np.bool_)
    for column in columns:
        can_match &= fits_column(values[column.name], column)
    fitting_rows = values.filter(pa.array(can_match))
    ordinals = np.full(len(values), -1, dtype=np.int64)
    ordinals[can_match] = keys.match([read_column(fitting_rows, field) for field in keys.fields])
    return ordinals
