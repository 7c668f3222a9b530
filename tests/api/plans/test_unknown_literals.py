"""Tests of infinities in filters, which PyIceberg writes as JSON null.

The server's plans must give the same rows and counts as plans that PyIceberg makes itself.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.expressions import (
    And,
    BooleanExpression,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    NotEqualTo,
    NotIn,
    Or,
)
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import DoubleType, FloatType, LongType, NestedField

from seamark.formats.iceberg.expressions.binding import bind
from seamark.formats.iceberg.expressions.expression import And as AllOf
from seamark.formats.iceberg.expressions.expression import Bound, Expression
from seamark.formats.iceberg.expressions.expression import Or as AnyOf
from seamark.formats.iceberg.expressions.expression_json import parse_expression
from seamark.formats.iceberg.types import schema as types
from seamark.formats.runtime.errors import BadRequest
from tests.seeds import first_seed
from tests.services.seamark import Seamark

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
VALUES = [math.inf, -math.inf, math.nan, None, 0.0, -0.0, 1.5, -2.5]
COMPARISON_CLASSES = (EqualTo, NotEqualTo, LessThan, LessThanOrEqual, GreaterThan, GreaterThanOrEqual)


def bind_filter(filter_json: Any) -> Expression:
    schema = types.Schema((types.Field(1, "d", True, "double"), types.Field(2, "n", False, "long")), 0)
    return bind(parse_expression(filter_json, unknown=True), schema, (), case_sensitive=True)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("op", ["eq", "not-eq", "lt", "lt-eq", "gt", "gt-eq"])
def test_predicate_with_an_unknown_literal_matches_every_row_negated_or_not(op: str) -> None:
    predicate = {"type": op, "term": "d", "value": None}
    for filter_json in (predicate, {"type": "not", "child": predicate}):
        bound_filter = bind_filter(filter_json)
        assert isinstance(bound_filter, AnyOf)
        assert {child.op.value for child in bound_filter.children if isinstance(child, Bound)} == {
            "is-null",
            "not-null",
        }
    known_predicate = {"type": "eq", "term": "n", "value": 5}
    conjunction = bind_filter({"type": "and", "left": predicate, "right": known_predicate})
    assert isinstance(conjunction, AllOf)
    assert bind_filter(known_predicate) in conjunction.children


def test_null_literal_is_rejected_for_columns_without_infinities_and_exact_filters() -> None:
    with pytest.raises(BadRequest, match="null is not a literal"):
        bind_filter({"type": "eq", "term": "n", "value": None})
    with pytest.raises(BadRequest, match="null is not a literal"):
        parse_expression({"type": "eq", "term": "d", "value": None})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seamark]:
    with Seamark(tmp_path_factory.mktemp("infinities")) as seamark:
        yield seamark


def build_random_condition(rng: random.Random, depth: int = 2) -> BooleanExpression:
    if depth and rng.random() < 0.6:
        left_condition, right_condition = build_random_condition(rng, depth - 1), build_random_condition(rng, depth - 1)
        return rng.choice(
            [And(left_condition, right_condition), Or(left_condition, right_condition), Not(left_condition)]
        )
    column = rng.choice(["d", "f"])
    literal = rng.choice([math.inf, -math.inf, math.inf, 1.5, 0.0])
    kind = rng.choice([*COMPARISON_CLASSES, In, NotIn, IsNull])
    if kind is IsNull:
        return IsNull(column)
    if kind in (In, NotIn):
        return kind(column, (literal, 1.5, -2.5))  # type: ignore[call-arg]
    return kind(column, literal)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("is_partitioned", [False, True])
def test_server_and_client_find_and_count_the_same_rows(server: Seamark, is_partitioned: bool) -> None:
    schema = Schema(
        NestedField(1, "id", LongType()), NestedField(2, "d", DoubleType()), NestedField(3, "f", FloatType())
    )
    spec = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "d")) if is_partitioned else PartitionSpec()
    name = f"db.t{is_partitioned}"
    tables: dict[str, Table] = {}
    with RestCatalog("writer", uri=server.base_url) as catalog:
        catalog.create_namespace_if_not_exists("db")
        table = catalog.create_table(name, schema=schema, partition_spec=spec)
        # PyIceberg evaluates comparisons for partitions of null, NaN and -0.0 differently than for rows.
        values = [math.inf, -math.inf, 0.0, 1.5, -2.5] if is_partitioned else VALUES
        for number, value in enumerate(values):
            rows = {"id": [number, 100 + number], "d": [value, value], "f": [VALUES[-1 - number], 1.0]}
            table.append(pa.table(rows, schema=table.schema().as_arrow()))
    for mode in ("server", "client"):
        with RestCatalog(mode, uri=server.base_url, **{"scan-planning-mode": mode}) as catalog:
            tables[mode] = catalog.load_table(name)
    rng, infinity_count = random.Random(first_seed()), 0
    for _ in range(25):  # Enough random conditions that some contain an infinity
        condition = build_random_condition(rng)
        id_counts = {
            mode: Counter(opened_table.scan(row_filter=condition).to_arrow()["id"].to_pylist())
            for mode, opened_table in tables.items()
        }
        assert id_counts["server"] == id_counts["client"], condition
        # Other filters match whole partitions, and PyIceberg counts their nulls from metadata.
        if "inf" in repr(condition):
            infinity_count += 1
            assert tables["server"].scan(row_filter=condition).count() == id_counts["server"].total(), condition
    assert infinity_count
