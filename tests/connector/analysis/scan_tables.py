"""The tables of the tests of scans, and what is found in a statement over them."""

from __future__ import annotations

from seamark.connector.analysis.scans import find_scans
from seamark.connector.plans.scan import Scan

TABLES = {
    "orders": {"o_key": "long", "o_day": "date", "o_cust": "long", "status": "string"},
    "others": {"o_key": "long"},
    "items": {"i_key": "long", "i_day": "date", "qty": "decimal(9, 2)", "ts": "timestamp", "tz": "timestamptz"},
    "parts": {"p_key": "long", "brand": "string", "size": "int", "ok": "boolean"},
}


def columns_of(names: tuple[str | None, str | None, str]) -> dict[str, str] | None:
    return TABLES.get(names[2])


def found(statement: str, **more: object) -> tuple[Scan, ...]:
    return find_scans(statement, columns_of=columns_of, **more)  # type: ignore[arg-type]


def predicates(statement: str, **more: object) -> dict[str, str | None]:
    """By the alias or else the name that stands in the text; each table once."""
    return {one.table: one.predicate for one in found(statement, **more)}
