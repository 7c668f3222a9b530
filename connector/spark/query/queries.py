"""A query in SQL, answered by Spark itself over the files that its conditions and its joins leave.

    from seamark.spark import sql
    sql(spark, "SELECT … FROM sea.ssb.lineorder JOIN …").show()

Spark asks the server for plans with the conditions that it has pushed down, but never tells of joins, and reads tables
of version 3 without asking. Here the whole query is looked at (`places.py`, `relations.py`), tables are asked for as
plan tables (`connector/plans/`), and their names put into the query's text, which Spark then runs.

The rule kept: doubt and failure leave the text alone; what is no query goes to Spark as it came, once. The names of
plan tables are good for a lease, and a DataFrame reads by them for as long as it is used.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from seamark.connector.plans import joins as joining
from seamark.connector.plans.async_client import KnownTable, Name, PlanTableResponse, open_seamark
from seamark.connector.plans.joins import Dimension
from seamark.connector.plans.plan_requests import PlanRequests, used_joins
from seamark.connector.plans.scan import Join, Scan
from seamark.connector.spark.query.catalyst import Catalyst, Node
from seamark.connector.spark.query.conditions import SparkColumn, all_of, any_of, spark_kind
from seamark.connector.spark.query.name_positions import (
    TableReference,
    UnsupportedQuery,
    find_references,
    insert_markers,
    marker_number,
    replace_names,
)
from seamark.connector.spark.query.relations import Relation, Relations, TooLarge
from seamark.metaserver.wire import PLAN_MARK

LEASE_S = 86_400
KEPT_MAX = 0.95
BUDGET_S = 10.0
"""For all questions of one query."""
_CATALOG_CLASS = "org.apache.iceberg.spark.SparkCatalog"
_SETTINGS = ("spark.wap.branch", "spark.wap.id")
"""With these Iceberg reads other snapshots than a table's own."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RewrittenQuery:
    """`statement` is None where the text is to be run as it came. `summary`: what was done, in one line."""

    statement: str | None
    summary: str
    files: int = 0
    considered_files: int = 0
    """Of the tables that plan tables stand for."""
    schemas: Mapping[Name, int] | None = None
    """By which schemas of the plans' tables the text was understood."""


@dataclass(frozen=True)
class _Table:
    """What a mark turned out to stand at."""

    catalog: str
    name: Name
    known: KnownTable
    schema_id: int
    columns: Mapping[str, str]
    """Those that mean the same to Spark and to the catalog; and Spark's types."""

    @property
    def read(self) -> tuple[str, Name]:
        return self.catalog, self.name


def sql(
    spark: SparkSession,
    text: str,
    args: Mapping[str, Any] | Sequence[Any] | None = None,
    *,
    lease_s: int = LEASE_S,
    kept_max: float = KEPT_MAX,
) -> DataFrame:
    """What `spark.sql(text, args)` gives, from fewer files where they can be told beforehand.

    The DataFrame reads its tables as they are now, and is good for at least half of `lease_s` seconds (as far as the
    server grants so many). A table is read by its own name where more than the share `kept_max` of its files is left.
    """
    done = rewritten(spark, text, args, lease_s=lease_s, kept_max=kept_max)
    _log.info("%s", done.summary)
    if done.statement is not None:
        try:
            frame = _run(spark, done.statement, args)
            if _is_as_understood(frame, done):
                return frame
            _log.warning("run as it came: its tables were altered meanwhile")
        except (PySparkException, Py4JError) as error:
            _log.warning("run as it came: Spark does not take it with plan tables: %s", error)
    return _run(spark, text, args)


def rewritten(
    spark: SparkSession,
    text: str,
    args: Mapping[str, Any] | Sequence[Any] | None = None,
    *,
    lease_s: int = LEASE_S,
    kept_max: float = KEPT_MAX,
) -> RewrittenQuery:
    """The text over plan tables, which are made if there are none yet; nothing is run. Never fails."""
    try:
        return _Query(spark, text, args, lease_s, kept_max).rewritten()
    except (UnsupportedQuery, TooLarge) as why:
        return RewrittenQuery(None, f"unchanged; {why or 'too large a plan'}")
    except (PySparkException, Py4JError) as error:
        return RewrittenQuery(None, f"unchanged; Spark cannot read it: {str(error).strip().partition(chr(10))[0]}")
    except Exception as error:  # noqa: BLE001  one bug of ours must fail no query
        _log.warning("unchanged, by a fault of ours", exc_info=True)
        return RewrittenQuery(None, f"unchanged; {type(error).__name__}")


def _run(spark: SparkSession, text: str, args: Any) -> DataFrame:
    return spark.sql(text) if args is None else spark.sql(text, args)


class _Query:
    def __init__(self, spark: SparkSession, text: str, args: Any, lease_s: int, kept_max: float) -> None:
        self._spark = spark
        self._text = text
        self._args = args
        self._lease_s = lease_s
        self._kept_max = kept_max
        self._catalyst = Catalyst(spark)
        self._tables: dict[int, _Table] = {}
        """By mark."""
        self._marks: dict[int, int] = {}
        """By the ids of attributes."""

    def rewritten(self) -> RewrittenQuery:
        if any(self._spark.conf.get(name, None) for name in _SETTINGS):
            raise UnsupportedQuery("the session reads a branch to be audited")
        found = find_references(self._catalyst, self._text)
        if not found:
            raise UnsupportedQuery("no table")
        if self._catalyst.has_cached() and self._reads_cached():
            raise UnsupportedQuery("it reads what the session has cached")
        plan = _analyzed(_run(self._spark, insert_markers(self._text, found), self._args))
        scans = self._scans(found, plan)
        if not any(scan.predicate is not None or scan.joins for scan in scans.values()):
            raise UnsupportedQuery("no table of a Seamark server whose files could be pruned")
        return self._planned(found, scans)

    def _reads_cached(self) -> bool:
        execution = _run(self._spark, self._text, self._args)._jdf.queryExecution()
        return any("InMemory" in self._catalyst.kind(one) for one in self._catalyst.leaves(execution.withCachedData()))

    # What is read

    def _scans(self, found: Sequence[TableReference], plan: Node) -> dict[int, Scan]:
        """By mark."""
        plan = self._catalyst.inlined(plan)
        self._find(plan)
        relations = Relations(self._catalyst, self._relation)
        relations.read(self._catalyst.simplified(plan))
        by_mark: defaultdict[int, list[Relation]] = defaultdict(list)
        for one in relations.found:
            by_mark[one.mark].append(one)
        scans = {}
        for mark, table in sorted(self._tables.items()):
            each, place = by_mark.get(mark, []), found[mark]
            said = any_of([all_of(one.parts) for one in each])
            joins = each[0].joins if len(each) == 1 else []
            scans[mark] = Scan(
                catalog=table.catalog,
                schema=".".join(table.name[:-1]),
                table=table.name[-1],
                start=place.start,
                end=place.end,
                name_start=place.start,
                alias_needed=place.alias,
                snapshot_id=place.snapshot_id,
                version_span=None,
                predicate=None if said is None else said.sql,
                named=frozenset() if said is None else said.names,
                joins=tuple(Join(other.mark, on) for other, on in joins if other.mark != mark),
            )
        return scans

    def _find(self, plan: Node) -> None:
        """What the marks stand at. A table that is also read elsewhere, by a view, is left alone: it is read once."""
        catalyst, unmarked = self._catalyst, set()
        for leaf, mark in catalyst.aliased(plan, marker_number):
            table = self._table(leaf)
            if table is None:
                continue
            numbers = [number for number, _ in catalyst.attributes(leaf)]
            if mark is None:
                unmarked.add(table.read)
            elif self._tables.setdefault(mark, table) == table:
                self._marks |= dict.fromkeys(numbers, mark)
        self._tables = {mark: table for mark, table in self._tables.items() if table.read not in unmarked}

    def _relation(self, leaf: Node) -> Relation | None:
        """Raises Unread for a copy of one that was found, which would have to be known, too."""
        if not self._catalyst.is_relation(leaf):
            return None
        attributes = self._catalyst.attributes(leaf)
        marks = {self._marks.get(number) for number, _ in attributes}
        mark = marks.pop() if len(marks) == 1 else None
        table = None if mark is None else self._tables.get(mark)
        if table is not None and mark is not None:
            there = {
                number: SparkColumn(name, table.columns[name]) for number, name in attributes if name in table.columns
            }
            return Relation(mark, there)
        table = self._table(leaf) if mark is None else None
        if table is not None and table.read in {one.read for one in self._tables.values()}:
            raise UnsupportedQuery("its relations cannot be distinguished")
        return None

    def _table(self, leaf: Node) -> _Table | None:
        """None for what is no table of an Iceberg catalog with a server."""
        if not self._catalyst.is_relation(leaf):
            return None
        catalog, identifier = leaf.catalog(), leaf.identifier()
        if catalog.isEmpty() or identifier.isEmpty() or catalog.get().getClass().getName() != _CATALOG_CLASS:
            return None
        name = _name(identifier.get())
        if not self._setting(catalog.get().name(), "uri").startswith("http") or PLAN_MARK in name[-1]:
            return None
        table = leaf.table().table()
        schema, snapshot = self._catalyst.iceberg_schema(table), table.currentSnapshot()
        kinds = {str(one["name"]): spark_kind(one["type"]) for one in schema["fields"]}
        summary = {} if snapshot is None else snapshot.summary()
        known = KnownTable(
            "",
            None,
            None if snapshot is None else int(snapshot.snapshotId()),
            *(_number(summary.get(key)) for key in ("total-files-size", "total-data-files")),
        )
        # With a dot in its name, a column could be a part of another one to the catalog.
        columns = {column: kind for column, kind in kinds.items() if kind is not None and "." not in column}
        return _Table(str(catalog.get().name()), name, known, int(schema["schema-id"]), columns)

    def _setting(self, catalog: str, name: str) -> str:
        return str(self._spark.conf.get(f"spark.sql.catalog.{catalog}.{name}", "") or "")

    # What is asked

    def _planned(self, found: Sequence[TableReference], scans: Mapping[int, Scan]) -> RewrittenQuery:
        marks: dict[joining.PlannedScan, int] = {}
        plans: dict[joining.PlannedScan, PlanTableResponse] = {}
        dimensions: dict[joining.PlannedScan, tuple[Dimension, ...]] = {}
        why = ""
        for catalog in sorted({self._tables[mark].catalog for mark in scans}):
            own = {mark: scan for mark, scan in scans.items() if scan.catalog == catalog}
            places = {mark: joining.PlannedScan(scan, catalog, self._tables[mark].name) for mark, scan in own.items()}
            known = {(scan.catalog, scan.schema, scan.table): self._tables[mark].known for mark, scan in own.items()}
            limits = joining.find_dimensions(places, known)
            made, reason = self._asked(catalog, list(places.values()), limits)
            marks |= {place: mark for mark, place in places.items()}
            plans |= made
            dimensions |= limits
            why = why or reason
        if not plans:
            raise UnsupportedQuery(why or "plans keep too many of the files")
        names = {marks[place]: (place.catalog, *place.table[:-1], str(plan.name)) for place, plan in plans.items()}
        return RewrittenQuery(
            replace_names(self._text, {found[mark]: name for mark, name in names.items()}),
            _told(plans, dimensions),
            sum(plan.files for plan in plans.values()),
            sum(plan.considered_files for plan in plans.values()),
            {name: self._tables[mark].schema_id for mark, name in names.items()},
        )

    def _asked(
        self,
        catalog: str,
        own: list[joining.PlannedScan],
        dimensions: Mapping[joining.PlannedScan, tuple[Dimension, ...]],
    ) -> tuple[dict[joining.PlannedScan, PlanTableResponse], str]:
        uri, token = self._setting(catalog, "uri"), self._setting(catalog, "token") or None

        async def ask() -> tuple[dict[joining.PlannedScan, PlanTableResponse], str]:
            until_s = asyncio.get_running_loop().time() + BUDGET_S
            async with open_seamark(uri, token=token, lease_s=self._lease_s) as seamark:
                asking = PlanRequests(seamark, self._kept_max, until_s)
                return await asking.plans(own, dimensions), asking.why

        with ThreadPoolExecutor(1) as pool:  # a notebook's thread has a loop of its own
            return pool.submit(asyncio.run, ask()).result()


def _told(
    plans: Mapping[joining.PlannedScan, PlanTableResponse],
    dimensions: Mapping[joining.PlannedScan, tuple[Dimension, ...]],
) -> str:
    counts = [f"{'.'.join(place.table)}={plan.files}/{plan.considered_files}" for place, plan in plans.items()]
    used = [
        f"{'.'.join(place.table)}.{columns}:{keys}"
        for place, plan in plans.items()
        for columns, keys in used_joins(dimensions.get(place, ()), plan)
    ]
    return "; ".join(["rewritten", *counts, *([f"joins={','.join(used)}"] if used else [])])


def _analyzed(frame: DataFrame) -> Node:
    return frame._jdf.queryExecution().analyzed()


def _name(identifier: Any) -> Name:
    levels = identifier.namespace()
    return (*(str(levels[at]) for at in range(len(levels))), str(identifier.name()))


def _number(text: Any) -> int:
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() else 0


def _is_as_understood(frame: DataFrame, done: RewrittenQuery) -> bool:
    """Each plan table is there, with the very schema that its conditions were read by."""
    catalyst = Catalyst(frame.sparkSession)
    found = {}
    for leaf in catalyst.leaves(_analyzed(frame)):
        if catalyst.is_relation(leaf) and leaf.identifier().isDefined():
            name = (str(leaf.catalog().get().name()), *_name(leaf.identifier().get()))
            if PLAN_MARK in name[-1]:
                found[name] = int(leaf.table().table().schema().schemaId())
    return found == done.schemas
