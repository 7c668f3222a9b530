"""Trino's row filters and column masks, as far as they decide whether a rewritten statement may give its rows.

Trino applies its rules to a version of a table as it does to the table. Two things it cannot see. A mask changes a
column's values before the statement's condition is applied, and plans leave files out by the values that are stored.
And a join with a table leaves files out by all rows of that table that meet its condition, those behind a filter
included, so how much is read tells of them. Trino says which rules are in force, of each table that a statement reads,
in `referencedTables` of `GET /v1/query/{id}`, once it has analysed the statement.

The rule kept: where a column is masked that files were left out by, where a table is filtered by whose rows files of
another were left out, where a rule has a query of its own, and where it is not known what is in force, the statement
runs as it came. How many files were left out is told to nobody who is subject to a rule.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec

from seamark.connector.trino.protocol.sessions import PARTITION_FILTER
from seamark.metaserver.wire import PLAN_MARK

_SUBQUERY = re.compile(r"\bselect\b|\btable\b", re.IGNORECASE)
TableName = tuple[str, str, str]
"""Catalog, schema and table, in lower case."""


class RuleDecision(Enum):
    UNKNOWN = "what Trino's rules say is not known"
    FREE = "no rule is in force"
    QUIET = "rules are in force that change nothing"
    FORBIDDEN = "a rule forbids to leave files out"


@dataclass(frozen=True)
class Used:
    """What files were left out by. `columns` of each table that is read by a plan, and of those that these are joined
    with; `limiting` are the latter. `views` are read through plan views. `explains`: what is read is shown."""

    columns: Mapping[TableName, frozenset[str]] = field(default_factory=dict)
    limiting: frozenset[TableName] = frozenset()
    views: frozenset[TableName] = frozenset()
    explains: bool = False


class _Column(msgspec.Struct):
    column: str
    mask: str | None = None


class _Table(msgspec.Struct):
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
        return [*self.filters, *(one.mask for one in self.columns if one.mask is not None)]


class _Session(msgspec.Struct, rename="camel"):
    catalog_properties: dict[str, dict[str, str]] = {}


class _Query(msgspec.Struct, rename="camel"):
    referenced_tables: list[_Table]
    session: _Session


def judge(answer: bytes, used: Used) -> RuleDecision:
    """By what `GET /v1/query/{id}?pruned=true` says of the rewritten statement."""
    try:
        query = msgspec.json.decode(answer, type=_Query)
    except msgspec.MsgspecError:
        return RuleDecision.UNKNOWN
    tables = query.referenced_tables
    if not {*used.columns, *used.views} <= {one.name for one in tables}:
        return RuleDecision.UNKNOWN
    if any(_needs_partition_filter(query.session.catalog_properties.get(name[0], {})) for name in used.columns):
        return RuleDecision.FORBIDDEN
    if any(_forbids(one, used) for one in tables):
        return RuleDecision.FORBIDDEN
    if not any(one.rules for one in tables):
        return RuleDecision.FREE
    return RuleDecision.FORBIDDEN if used.explains else RuleDecision.QUIET


def _forbids(table: _Table, used: Used) -> bool:
    if not table.rules:
        return False
    if table.name in used.views or PLAN_MARK in table.table:
        return True
    if any(_SUBQUERY.search(rule) for rule in table.rules):
        return True
    masked = {one.column.lower() for one in table.columns if one.mask is not None}
    if masked & used.columns.get(table.name, frozenset()):
        return True
    return bool(table.filters) and table.name in used.limiting


def _needs_partition_filter(properties: Mapping[str, Any]) -> bool:
    return str(properties.get(PARTITION_FILTER, "false")).lower() != "false"
