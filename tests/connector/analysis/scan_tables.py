"""The tables for the tests of scans, and functions that find the scans of a statement on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from seamark.connector.analysis.lexer import UnsupportedStatement
from seamark.connector.analysis.scans import collect_scans, find_scans, parse_query
from seamark.connector.plans.scan import Scan

TABLES = {
    "orders": {"o_key": "long", "o_day": "date", "o_cust": "long", "status": "string"},
    "others": {"o_key": "long"},
    "items": {"i_key": "long", "i_day": "date", "qty": "decimal(9, 2)", "ts": "timestamp", "tz": "timestamptz"},
    "parts": {"p_key": "long", "brand": "string", "size": "int", "ok": "boolean"},
}


def get_columns(names: tuple[str | None, str | None, str]) -> dict[str, str] | None:
    return TABLES.get(names[2])


def find_statement_scans(statement: str, *, parameters: Sequence[str] = (), **options: Any) -> tuple[Scan, ...]:
    """Return the scans of the statement.

    Also check that the statement's tree is unchanged after its scans are read twice, as the proxy reads them.
    """
    scans = find_scans(statement, find_columns=get_columns, parameters=parameters, **options)
    try:
        query = parse_query(statement, parameters)
    except UnsupportedStatement:
        assert scans == ()
        return scans
    collect_scans(query, **options)
    collect_scans(query, find_columns=get_columns, **options)
    assert collect_scans(query, find_columns=get_columns, **options) == scans
    return scans


def find_predicates(statement: str, **options: object) -> dict[str, str | None]:
    """Return the predicate of each table, by the table's name."""
    return {scan.table: scan.predicate for scan in find_statement_scans(statement, **options)}
