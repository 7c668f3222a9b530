"""Tests of joins in the queries of the benchmarks SSB and TPC-H.

In SSB, every dimension with a condition limits the large table. In TPC-H, chains of several dimensions limit
the large table.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.ssb.queries import QUERIES
from seamark.connector.analysis.scans import find_scans
from seamark.connector.plans.async_client import KnownTable
from seamark.connector.plans.joins import Dimension, PlannedScan, explain_unrequested_joins, find_dimensions

MIB = 1 << 20
SSB = {
    "lineorder": ("lo_custkey lo_partkey lo_suppkey lo_orderdate lo_quantity lo_discount", 1000 * MIB),
    "date": ("d_datekey d_year d_yearmonthnum d_weeknuminyear d_yearmonth", MIB),
    "part": ("p_partkey p_mfgr p_category p_brand1", 100 * MIB),
    "supplier": ("s_suppkey s_nation s_city s_region", 5 * MIB),
    "customer": ("c_custkey c_nation c_city c_region", 50 * MIB),
}
TPCH = {
    "lineitem": ("l_orderkey l_partkey l_suppkey l_shipdate l_quantity l_receiptdate l_commitdate", 760 * MIB),
    "orders": ("o_orderkey o_custkey o_orderdate o_orderstatus", 170 * MIB),
    "partsupp": ("ps_partkey ps_suppkey ps_availqty", 115 * MIB),
    "part": ("p_partkey p_name p_brand p_size p_type p_container", 24 * MIB),
    "customer": ("c_custkey c_nationkey c_mktsegment", 24 * MIB),
    "supplier": ("s_suppkey s_nationkey s_comment", MIB),
    "nation": ("n_nationkey n_regionkey n_name", 1000),
    "region": ("r_regionkey r_name", 1000),
}
_STRING_COLUMNS = {"p_name": "string", "p_brand1": "string"}
TPCH_QUERIES_FILE = Path(__file__).parents[2] / "deploy" / "tpch.sql"


def find_limiting_joins(sql: str, table: str, tables: dict[str, tuple[str, int]]) -> list[str]:
    """Return the joins that limit each scan of the table."""
    join_plans, _ = plan_joins(sql, tables)
    return [
        format_dimensions(dimensions)
        for planned_scan, dimensions in join_plans.items()
        if planned_scan.table == (table,)
    ]


def plan_joins(
    sql: str, tables: dict[str, tuple[str, int]]
) -> tuple[dict[PlannedScan, tuple[Dimension, ...]], list[tuple[str, list[str]]]]:
    """Return the joined tables by which each scan can leave out files, and why other joins are not requested.

    Args:
        sql: The statement.
        tables: The names of the columns and the size in bytes of each table, by its name.

    Returns:
        The joined tables by scan, and (table, reasons) for each scan.
    """
    columns_by_table = {
        (None, None, name): KnownTable(
            version="1",
            columns={column: _STRING_COLUMNS.get(column, "long") for column in columns.split()},
            snapshot_id=1,
            size_bytes=size,
            files=2,
        )
        for name, (columns, size) in tables.items()
    }
    scans = find_scans(sql, find_columns=lambda names: columns_by_table[names].columns)
    planned_scans = {number: PlannedScan(scan, catalog="c", table=(scan.table,)) for number, scan in enumerate(scans)}
    chosen_dimensions = find_dimensions(planned_scans, columns_by_table)
    reasons = [
        (planned_scan.table[0], explain_unrequested_joins(number, planned_scans, columns_by_table, chosen_dimensions))
        for number, planned_scan in planned_scans.items()
    ]
    return chosen_dimensions, reasons


def format_dimensions(dimensions: tuple[Dimension, ...]) -> str:
    texts = []
    for dimension in dimensions:
        nested_dimensions = f" ({format_dimensions(dimension.dimensions)})" if dimension.dimensions else ""
        texts.append(
            f"{'+'.join(column for column, _ in dimension.on)}: {dimension.planned.table[0]}{nested_dimensions}"
        )
    return ", ".join(sorted(texts))


@pytest.mark.parametrize("name", QUERIES)
def test_each_dimension_with_a_condition_limits_the_facts(name: str) -> None:
    date, part = "lo_orderdate: date", "lo_partkey: part"
    supplier, customer = "lo_suppkey: supplier", "lo_custkey: customer"
    joins_of_flights = {
        "Q1": [date],
        "Q2": [part, supplier],
        "Q3": [customer, date, supplier],
        "Q4.1": [customer, part, supplier],
        "Q4": [customer, date, part, supplier],
    }
    # A flight is a group of similar queries in SSB. The query Q4.1 has no condition on the date.
    expected = joins_of_flights.get(name) or joins_of_flights[name.partition(".")[0]]
    assert find_limiting_joins(QUERIES[name], "lineorder", SSB) == [", ".join(sorted(expected))]


@pytest.mark.parametrize(
    ("number", "table", "expected"),
    [
        (3, "lineitem", ["l_orderkey: orders (o_custkey: customer)"]),
        (3, "orders", ["o_custkey: customer"]),
        (
            5,
            "lineitem",
            [
                "l_orderkey: orders (o_custkey: customer (c_nationkey: nation (n_regionkey: region))), "
                "l_suppkey: supplier (s_nationkey: nation (n_regionkey: region))"
            ],
        ),
        (9, "lineitem", ["l_partkey+l_suppkey: partsupp (ps_partkey: part), l_partkey: part"]),
        (11, "partsupp", ["ps_suppkey: supplier (s_nationkey: nation)"] * 2),
        (17, "lineitem", ["l_partkey: part"] * 2),
        (19, "lineitem", ["l_partkey: part"]),  # Each branch of OR contains the join.
        (20, "partsupp", ["ps_partkey: part"]),
        (21, "lineitem", ["l_orderkey: orders, l_suppkey: supplier (s_nationkey: nation)"]),
        (4, "orders", []),
        (18, "lineitem", []),
    ],
)
def test_snowflake_dimension_limits_a_table_by_its_conditions(number: int, table: str, expected: list[str]) -> None:
    assert find_limiting_joins(read_query(number), table, TPCH) == expected


def read_query(number: int) -> str:
    text = "\n".join(line for line in TPCH_QUERIES_FILE.read_text().splitlines() if not line.startswith("--"))
    return text.split(";")[number - 1]


def test_join_that_is_not_requested_has_a_reason() -> None:
    size_reason = "the table is not 4 times smaller"
    no_condition = "neither it nor a smaller table that it is joined with has a condition"

    def list_reasons(**reasons: str) -> list[str]:
        return [f"the join with {table} leaves out no files, because {reason}" for table, reason in reasons.items()]

    _, actual = plan_joins(read_query(18), TPCH)
    assert actual == [
        ("customer", list_reasons(orders=size_reason)),
        ("orders", list_reasons(customer=no_condition, lineitem=size_reason)),
        ("lineitem", list_reasons(orders=no_condition, lineitem=size_reason)),
        ("lineitem", []),
    ]
    _, actual = plan_joins(read_query(9), TPCH)
    assert dict(actual)["lineitem"] == list_reasons(supplier=no_condition, orders=no_condition)
    assert dict(actual)["part"] == list_reasons(lineitem=size_reason)
