"""Tests of index probes for 0.0 and -0.0 in one filter: they are equal in Python, but not in Iceberg."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from seamark.formats.iceberg.expressions.binding import bind
from seamark.formats.iceberg.expressions.expression_json import parse_expression
from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.planner.indexes.resolver import IndexResolver
from seamark.metaserver.planner.pruning.semantics import ComparisonSemantics
from seamark.metaserver.planner.rows.row_matches import PredicateMatcher
from seamark.metaserver.planner.scan.request import ScanRequest
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.port import PointerStore
from tests.planner.indexes.test_indexed_evolution import EvolvedTable, build_column, create_evolved_table
from tests.planner.lakes.indexing import create_namespace, open_planning
from tests.planner.lakes.tables import list_file_numbers

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "not-eq": operator.ne,
    "lt": operator.lt,
    "lt-eq": operator.le,
    "gt": operator.gt,
    "gt-eq": operator.ge,
}
ZEROS = [0.0, -0.0]
PRICES = {0: [0.0] * 10, 1: [-0.0] * 10}
"""Prices by file; each file has ten rows."""
FILTERS = [
    {
        "type": operator,
        "left": {"type": op, "term": "price", "value": first},
        "right": {"type": op, "term": "price", "value": other},
    }
    for operator, op, (first, other) in product(("or", "and"), COMPARISONS, permutations(ZEROS))
]


def to_iceberg_order(value: float) -> tuple[float, float]:
    """Return a sort key in Iceberg's order, in which -0.0 is less than 0.0."""
    return value, math.copysign(1.0, value)


def to_sql_order(value: float) -> float:
    return value


CLIENTS = {
    ComparisonSemantics.ICEBERG: (to_iceberg_order,),
    ComparisonSemantics.SQL: (to_sql_order,),
    ComparisonSemantics.POSSIBLE: (to_iceberg_order, to_sql_order),
}


def matches_filter(filter: Any, value: float, semantics: ComparisonSemantics) -> bool:
    if filter["type"] in ("or", "and"):
        sides = [matches_filter(filter[side], value, semantics) for side in ("left", "right")]
        return any(sides) if filter["type"] == "or" else all(sides)
    compare = COMPARISONS[filter["type"]]
    return any(compare(key(value), key(filter["value"])) for key in CLIENTS[semantics])


async def create_price_table(folder: Path, store: PointerStore, kind: str) -> EvolvedTable:
    price = [build_column(3, "price", "double")]
    table = await create_evolved_table(folder, store, price, price, f"{kind}(price)")
    table.arrays = {number: {3: pa.array(values)} for number, values in PRICES.items()}
    await table.index("i", range(2))
    return table


@pytest.mark.parametrize("kind", ["bloom", "bitmap", "record"])
async def test_filter_with_both_zeros_finds_both_in_an_index(kind: str, tmp_path: Path) -> None:
    async with open_store(f"sqlite:///{tmp_path / 's.db'}", clock=SystemClock()) as store:
        await create_namespace(store)
        table = await create_price_table(tmp_path, store, kind)
        async with open_planning(tmp_path, table.registry) as planning:
            for filter in FILTERS:
                request = ScanRequest(filter=parse_expression(filter))
                numbers = list_file_numbers(
                    await planning.planner.bind_and_plan(table.metadata, request, await table.build_entry())
                )
                expected = {
                    number
                    for number in PRICES
                    if matches_filter(filter, PRICES[number][0], ComparisonSemantics.POSSIBLE)
                }
                assert expected <= set(numbers), filter
                assert kind != "bitmap" or expected == set(numbers), filter


@pytest.mark.parametrize("semantics", ComparisonSemantics)
async def test_filter_with_both_zeros_locates_the_rows_of_both_zeros(
    semantics: ComparisonSemantics, tmp_path: Path
) -> None:
    async with open_store(f"sqlite:///{tmp_path / 's.db'}", clock=SystemClock()) as store:
        await create_namespace(store)
        table = await create_price_table(tmp_path, store, "bitmap")
        async with open_planning(tmp_path, table.registry) as planning:
            view = await planning.planner.view(table.metadata, ScanRequest())
            resolver = IndexResolver(planning.indexes)
            index = await resolver.open_bitmaps(view, table.definitions["i"], await table.build_entry())
            for filter in FILTERS:
                matcher = PredicateMatcher({(3, "identity"): index}, semantics, from_sql=False)
                schema = table.metadata.current_schema
                bound = bind(parse_expression(filter), schema, [schema], case_sensitive=True)
                for file_number, values in PRICES.items():
                    bits, are_exact = matcher.match_rows(bound, file_number, len(values))
                    assert are_exact, filter
                    assert bits is not None
                    assert bool(bits.any()) == matches_filter(filter, values[0], semantics), (filter, values)
