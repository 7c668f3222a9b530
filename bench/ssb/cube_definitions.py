"""The cubes of the facts that answer queries of the Star Schema Benchmark, for `bench/ssb/cubes.py` and the demo."""

from __future__ import annotations

from collections.abc import Sequence

from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.names import Name
from seamark.connector.index.lookups import pin_attributes

_JOINS = {
    "d": ("date", "lo_orderdate = d_datekey"),
    "c": ("customer", "lo_custkey = c_custkey"),
    "s": ("supplier", "lo_suppkey = s_suppkey"),
    "p": ("part", "lo_partkey = p_partkey"),
}
"""The dimension tables and the conditions of their joins, by the first letter of their columns.

The names of columns begin with `d_`, `c_`, `s_` or `p_`, or with `lo_` if they belong to the fact table lineorder.
"""
CUBES: dict[str, tuple[Sequence[str], str]] = {
    "discount_by_year": (("d_year", "lo_discount", "lo_quantity"), "sum(lo_extendedprice * lo_discount)"),
    "discount_by_month": (("d_yearmonthnum", "lo_discount", "lo_quantity"), "sum(lo_extendedprice * lo_discount)"),
    "discount_by_week": (
        ("d_year", "d_weeknuminyear", "lo_discount", "lo_quantity"),
        "sum(lo_extendedprice * lo_discount)",
    ),
    "by_brand": (("d_year", "p_category", "p_brand1", "s_region"), "sum(lo_revenue)"),
    "by_nation": (("d_year", "c_region", "c_nation", "s_region", "s_nation"), "sum(lo_revenue)"),
    "by_city": (("d_year", "c_nation", "c_city", "s_nation", "s_city"), "sum(lo_revenue)"),
    "by_maker": (("d_year", "c_region", "c_nation", "s_region", "p_mfgr"), "sum(lo_revenue - lo_supplycost)"),
    "by_category": (
        ("d_year", "c_region", "s_region", "s_nation", "p_mfgr", "p_category"),
        "sum(lo_revenue - lo_supplycost)",
    ),
}
"""The dimensions and the measure of each cube."""
SHRINK = 5
"""The smallest average number of facts for each group of a cube."""


def define_cubes(client: IndexClient, facts: Name, dimension_namespace: str) -> None:
    """Define all cubes of a fact table whose dimension tables are in `dimension_namespace`.

    `pin_attributes` adds the current snapshot of the dimension table to each attribute, so that a cube is built from
    that snapshot. A large cube is refused if its groups have fewer than `SHRINK` facts on average.
    """
    for name, (columns, measure) in CUBES.items():
        terms = [_format_dimension(column, dimension_namespace) for column in columns]
        pinned_terms = pin_attributes(client, terms)
        client.put_index(facts, name, kind="cube", columns=pinned_terms, measures=[measure], shrink=SHRINK)


def _format_dimension(column: str, dimension_namespace: str) -> str:
    """Return a column of the facts, or an attribute of a dimension table with its join."""
    if column.startswith("lo_"):  # a column of the fact table lineorder
        return column
    table_letter = column[0]
    table, condition = _JOINS[table_letter]
    return f"{dimension_namespace}.{table}.{column} via {condition}"
