"""Finds and checks the table that a statement changes."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import SparkSession

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.engines import CATALOG_CLASS
from seamark.connector.plans.quotes import backquote
from seamark.connector.read.tables import OpenTable
from seamark.connector.spark.query.catalyst import Catalyst, Node

SPARK_TABLE = "org.apache.iceberg.spark.source.SparkTable"
SUMMARY_PREFIX = "spark.sql.iceberg.snapshot-property."
"""The prefix of the session's settings that Iceberg writes to the summary of each snapshot."""
_SETTINGS = ("spark.wap.branch", "spark.wap.id")
"""The settings that make Iceberg write to a branch that is not main, or commit without publishing."""
OPERATION = "__row_operation"
"""The column with the operation of each row in Spark's queries that return row changes."""
_RESERVED = frozenset(
    {OPERATION, "_file", "_pos", "_spec_id", "_partition", "_row_id", "_last_updated_sequence_number"}
)
_FORMAT = "write.format.default"


class MustRunInIceberg(Exception):
    """Raised if Seamark cannot run a statement, so that Iceberg has to run it. The message is the reason."""


@dataclass(frozen=True)
class StatementTarget:
    """A table of a catalog of the session.

    Attributes:
        levels: The levels of its namespace, and its name.
    """

    catalog: str
    levels: tuple[str, ...]
    uuid: str
    schema_id: int

    def open_client(self, spark: SparkSession) -> SeamarkClient:
        uri, token = (spark.conf.get(f"spark.sql.catalog.{self.catalog}.{key}", "") for key in ("uri", "token"))
        return SeamarkClient(str(uri), token=token or None)

    def refresh(self, spark: SparkSession) -> None:
        """Make Spark load the table again if the session or the catalog has cached it, as after Spark's own writes."""
        catalog_caches = spark.conf.get(f"spark.sql.catalog.{self.catalog}.cache-enabled", "true") != "false"
        if catalog_caches or Catalyst(spark).has_cached():
            spark.catalog.refreshTable(".".join(map(backquote, (self.catalog, *self.levels))))

    def check(self, source_table: OpenTable) -> None:
        """Check that the table is still the analysed table, and that Seamark can write it.

        Raises:
            MustRunInIceberg: The table was altered, or its files are not Parquet files.
        """
        if (source_table.metadata.table_uuid, source_table.metadata.current_schema_id) != (self.uuid, self.schema_id):
            raise MustRunInIceberg("the table was altered after the analysis")
        properties = source_table.metadata.properties
        if properties.get(_FORMAT, "parquet").lower() != "parquet":
            raise MustRunInIceberg(f"{_FORMAT} is {properties[_FORMAT]!r}; Seamark writes Parquet files")


def check_session(spark: SparkSession) -> None:
    """Check that the session's settings do not change the meaning of statements.

    Raises:
        MustRunInIceberg: The session writes to another branch, or commits without publishing.
    """
    if any(spark.conf.get(name, None) for name in _SETTINGS):
        raise MustRunInIceberg("the session writes to another branch, or commits without publishing")


def make_commit_summary(spark: SparkSession) -> dict[str, str]:
    """Return the summary of a statement's snapshot."""
    settings = str(spark._jsparkSession.sessionState().conf().getAllConfs().mkString("\0")).split("\0")
    snapshot_properties = dict(
        text.removeprefix(SUMMARY_PREFIX).split(" -> ", 1) for text in settings if text.startswith(SUMMARY_PREFIX)
    )
    return {"engine-name": "spark", "engine-version": spark.version, **snapshot_properties}


def find_target_relation(spark: SparkSession, table: Node) -> Node:
    """Return the relation below a resolved table node.

    Raises:
        MustRunInIceberg: The relation is not the current state of a table of a Seamark catalog.
    """
    catalyst = Catalyst(spark)
    while catalyst.find_kind(table) == "SubqueryAlias":
        table = table.child()
    if not catalyst.is_catalog_table(table) or table.catalog().isEmpty() or table.identifier().isEmpty():
        raise MustRunInIceberg("the target is not a table of a Seamark catalog")
    catalog = table.catalog().get()
    uri = str(spark.conf.get(f"spark.sql.catalog.{catalog.name()}.uri", "") or "")
    if (
        catalyst.read_class_name(catalog) != CATALOG_CLASS
        or not uri.startswith("http")
        or catalyst.read_class_name(table.table()) != SPARK_TABLE
        or table.timeTravelSpec().isDefined()
    ):
        raise MustRunInIceberg("the target is not a table of a Seamark catalog")
    if table.table().branch() is not None:
        raise MustRunInIceberg("the target is a branch")
    if reserved_names := _RESERVED & {name for _, name in catalyst.list_attributes(table)}:
        raise MustRunInIceberg(f"the table has a column {min(reserved_names)}, but Iceberg or Spark reserves this name")
    return table


def find_relation_target(catalyst: Catalyst, relation: Node) -> StatementTarget:
    levels, iceberg = catalyst.read_identifier(relation), relation.table().table()
    assert levels is not None
    return StatementTarget(
        str(relation.catalog().get().name()), levels, str(iceberg.uuid()), int(iceberg.schema().schemaId())
    )


def reads_table(catalyst: Catalyst, plan: Node, target: StatementTarget) -> bool:
    """Return whether the plan reads the target."""
    return any(
        catalyst.is_catalog_table(leaf)
        and catalyst.read_class_name(leaf.table()) == SPARK_TABLE
        and str(leaf.table().table().uuid()) == target.uuid
        for leaf in catalyst.leaves(plan)
    )
