"""Decides by Trino's row filters and column masks whether a rewritten statement may return its rows.

Trino also applies the access rules of a table to a version of the table. But Trino does not know two effects of plans.
First, a mask changes a column's values before the statement's condition is applied, while plans prune files by the
stored values. Second, a join prunes files by all rows of the joined table that match the condition on this table,
including rows that a row filter hides, so the amount of data that is read reveals the hidden rows. After the analysis
of a statement, `referencedTables` in the response to `GET /v1/query/{id}` lists the rules in force for each table that
the statement reads.

Invariant: the original statement runs in each of these cases: files were pruned by a masked column or by the rows of a
filtered table, groups of a cube replace rows of a table with a filter or with a mask on a used column, a rule contains
a query, or the rules in force are unknown. A user who is subject to a rule never receives the number of pruned files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec

from seamark.connector.trino.protocol.sessions import PARTITION_FILTER
from seamark.formats.protocol.wire import PLAN_MARK
from seamark.formats.runtime.decoding import convert_json

_SUBQUERY = re.compile(r"\bselect\b|\btable\b", re.IGNORECASE)
TableName = tuple[str, str, str]
"""The catalog, schema and table, in lower case."""


class RuleDecision(Enum):
    """The decision about a rewritten statement, by Trino's access rules in force."""

    UNKNOWN = "the rules of Trino are unknown"
    NO_RULES = "no rule is in force"
    NO_EFFECT = "rules are in force that change nothing"
    FORBIDDEN = "a rule forbids pruning"


@dataclass(frozen=True)
class PlanInputs:
    """The tables and columns by which files were pruned.

    Attributes:
        columns: The columns by which files were pruned, of each table with a plan and of each table that is joined with
            it.
        limiting: The tables by whose rows a join has pruned files of the joined table.
        views: The views that are read through plan views.
        explains: Whether the statement is an EXPLAIN, which shows the files that are read.
        aggregated: The tables whose rows are replaced by groups of a cube.
    """

    columns: Mapping[TableName, frozenset[str]] = field(default_factory=dict)
    limiting: frozenset[TableName] = frozenset()
    views: frozenset[TableName] = frozenset()
    explains: bool = False
    aggregated: frozenset[TableName] = frozenset()


class _Column(msgspec.Struct):
    column: str
    mask: str | None = None


class _Table(msgspec.Struct):
    """A table in Trino's description of a query, with the rules that are in force for the user."""

    catalog: str
    schema: str
    table: str
    filters: list[str] = []
    columns: list[_Column] = []

    @property
    def name(self) -> TableName:
        return self.catalog.lower(), self.schema.lower(), self.table.lower()

    @property
    def rules(self) -> list[str]:
        return [*self.filters, *(column.mask for column in self.columns if column.mask is not None)]


class _Session(msgspec.Struct, rename="camel"):
    catalog_properties: dict[str, dict[str, str]] = {}


class _Query(msgspec.Struct, rename="camel"):
    referenced_tables: list[_Table]
    session: _Session


def decide_access(answer: bytes, inputs: PlanInputs) -> RuleDecision:
    """Decide by Trino's access rules whether a rewritten statement may return its rows.

    Args:
        answer: Trino's response to `GET /v1/query/{id}?pruned=true`, which contains the rules of the tables.
        inputs: The tables and columns by which files were pruned.

    Returns:
        `UNKNOWN` if the response cannot be decoded, or does not describe all tables of the statement. `FORBIDDEN` if a
        rule hides rows or values by which files were pruned, or if Trino requires a condition on partition columns. Any
        rule forbids an EXPLAIN, because the shown files may reveal hidden rows. Otherwise `NO_RULES` if no table has a
        rule, and `NO_EFFECT` if the rules hide nothing by which files were pruned.
    """
    try:
        query = convert_json(answer, _Query)
    except msgspec.MsgspecError:
        return RuleDecision.UNKNOWN
    tables = query.referenced_tables
    if not {*inputs.columns, *inputs.views} <= {table.name for table in tables}:
        return RuleDecision.UNKNOWN
    if any(_needs_partition_filter(query.session.catalog_properties.get(name[0], {})) for name in inputs.columns):
        return RuleDecision.FORBIDDEN
    if any(_is_forbidden(table, inputs) for table in tables):
        return RuleDecision.FORBIDDEN
    if not any(table.rules for table in tables):
        return RuleDecision.NO_RULES
    return RuleDecision.FORBIDDEN if inputs.explains else RuleDecision.NO_EFFECT


def parse_columns_read(answer: bytes) -> dict[TableName, frozenset[str]]:
    """Return the columns that a statement reads from each table. The result is empty if the response cannot be decoded.

    Args:
        answer: Trino's response to `GET /v1/query/{id}?pruned=true`.
    """
    try:
        query = convert_json(answer, _Query)
    except msgspec.MsgspecError:
        return {}
    columns_by_table: dict[TableName, frozenset[str]] = {}
    for table in query.referenced_tables:
        columns_by_table[table.name] = columns_by_table.get(table.name, frozenset()) | {
            column.column for column in table.columns
        }
    return columns_by_table


def _is_forbidden(table: _Table, inputs: PlanInputs) -> bool:
    """Return whether a row filter or a column mask of a table may hide rows or values by which files were pruned."""
    if not table.rules:
        return False
    # Any rule on a view that is read through a plan view, or on a plan table itself, forbids the statement.
    if table.name in inputs.views or PLAN_MARK in table.table:
        return True
    # A rule with a subquery depends on other tables.
    if any(_SUBQUERY.search(rule) for rule in table.rules):
        return True
    # Pruning by a masked column would reveal its values.
    masked_columns = {column.column.lower() for column in table.columns if column.mask is not None}
    if masked_columns & inputs.columns.get(table.name, frozenset()):
        return True
    # Hidden rows must not prune the files of other tables, and must not be part of the groups of a cube.
    return bool(table.filters) and table.name in inputs.limiting | inputs.aggregated


def _needs_partition_filter(properties: Mapping[str, Any]) -> bool:
    return str(properties.get(PARTITION_FILTER, "false")).lower() != "false"
