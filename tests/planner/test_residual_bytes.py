"""Residuals of long filters: their bytes in an answer are bounded, and they are true for every matching row."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from msgspec.structs import replace
from pydantic import TypeAdapter
from pyiceberg.expressions import AlwaysTrue, BooleanExpression
from pyiceberg.expressions.visitors import expression_evaluator
from pyiceberg.schema import Schema
from pyiceberg.typedef import Record
from pyiceberg.types import DoubleType, LongType, NestedField, StringType

from seamark.formats.iceberg.expressions.binding import bind
from seamark.formats.iceberg.expressions.expression import TRUE, collect_predicates
from seamark.formats.iceberg.expressions.expression_json import encode_expression, parse_expression
from seamark.formats.iceberg.expressions.residuals import make_tautology, weaken_residual
from seamark.metaserver.planner.answer.answer import ScanTaskWriter, TaskForm
from seamark.metaserver.planner.answer.content_files import (
    JAVA_DIALECT,
    PYICEBERG_DIALECT,
    STANDARD_DIALECT,
    ClientDialect,
    choose_dialect,
)
from tests.planner.lakes.manifests import PartitionField
from tests.planner.test_answer import build_block, build_data_file, build_metadata, build_scan
from tests.seeds import mark_fast

BUDGET_BYTES = 1 << 20
TABLE = build_metadata((), kinds={1: "long", 2: "string", 13: "double"})
PYICEBERG_SCHEMA = Schema(
    NestedField(1, "c1", LongType()), NestedField(2, "c2", StringType()), NestedField(13, "c13", DoubleType())
)
BOOLEAN_EXPRESSION: TypeAdapter[Any] = TypeAdapter(BooleanExpression)


def draw_values(name: str, rng: random.Random, count: int) -> list[Any]:
    draw_functions = {
        "c1": lambda: rng.randrange(10),
        "c2": lambda: rng.choice("abcdefgh"),
        "c13": lambda: rng.randrange(9) / 2,
    }
    return [draw_functions[name]() for _ in range(count)]


def draw_expression(rng: random.Random, depth: int = 0) -> Any:
    if depth < 3 and rng.random() < 0.4:
        sides = {"left": draw_expression(rng, depth + 1), "right": draw_expression(rng, depth + 1)}
        return {"type": rng.choice(["and", "or"]), **sides}
    name = rng.choice(["c1", "c2", "c13"])
    op = rng.choice(["eq", "not-eq", "lt", "lt-eq", "gt", "gt-eq", "in", "not-in", "is-null", "not-null"])
    filter_json: dict[str, Any] = {"type": op, "term": name}
    if op in ("in", "not-in"):
        return {**filter_json, "values": draw_values(name, rng, 4)}
    return filter_json if op.endswith("null") else {**filter_json, "value": draw_values(name, rng, 1)[0]}


@pytest.mark.parametrize("seed", mark_fast(range(8), 1))
def test_weakened_residual_matches_every_row_of_the_residual_and_is_never_true(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        where = draw_expression(rng)
        bound = bind(parse_expression(where), TABLE.current_schema, TABLE.schemas, case_sensitive=True)
        if not collect_predicates(bound):
            continue
        weak_residual = weaken_residual(bound)
        assert weak_residual != TRUE
        residual_json = BOOLEAN_EXPRESSION.validate_python(encode_expression(weak_residual))
        assert residual_json != AlwaysTrue()
        strict_evaluator = expression_evaluator(
            PYICEBERG_SCHEMA, BOOLEAN_EXPRESSION.validate_python(where), case_sensitive=True
        )
        weak_evaluator = expression_evaluator(PYICEBERG_SCHEMA, residual_json, case_sensitive=True)
        tautology_evaluator = expression_evaluator(
            PYICEBERG_SCHEMA,
            BOOLEAN_EXPRESSION.validate_python(encode_expression(make_tautology(collect_predicates(bound)[0]))),
            case_sensitive=True,
        )
        for _ in range(40):
            row = Record(*(rng.choice([None, draw_values(name, rng, 1)[0]]) for name in ("c1", "c2", "c13")))
            assert tautology_evaluator(row)
            assert weak_evaluator(row) or not strict_evaluator(row)


def write_and_measure_tasks(
    file_count: int,
    where: Any,
    dialect: ClientDialect,
    *,
    spec: tuple[PartitionField, ...] = (),
    is_exact: bool = False,
) -> Any:
    """Write the tasks of a plan. Return the decoded tasks, and the size of their JSON in bytes."""
    data_files = [build_data_file(f"f{number}", (number,) if spec else ()) for number in range(file_count)]
    plan = build_scan(build_metadata(spec), [build_block(data_files, 0, spec)], where=where)
    writer = ScanTaskWriter(plan, dialect=dialect, form=TaskForm(residual_bytes=BUDGET_BYTES, exact_residuals=is_exact))
    pieces = list(writer.write_tasks(plan.entry_ids))
    return json.loads(b"[" + b"".join(pieces) + b"]"), sum(map(len, pieces))


def build_in_filter(count: int) -> dict[str, Any]:
    return {"type": "in", "term": "c1", "values": list(range(1, count + 1))}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("dialect", [STANDARD_DIALECT, JAVA_DIALECT, PYICEBERG_DIALECT])
def test_residuals_of_all_files_stay_within_the_byte_limit(dialect: ClientDialect) -> None:
    tasks, size = write_and_measure_tasks(500, build_in_filter(20_000), dialect)
    assert size < BUDGET_BYTES
    residuals = [task.get("residual-filter") for task in tasks]
    range_residual = {
        "type": "and",
        "left": {"type": "gt-eq", "term": "c1", "value": 1},
        "right": {"type": "lt-eq", "term": "c1", "value": 20_000},
    }
    assert residuals == [range_residual if dialect.needs_residuals else None] * 500


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("dialect", [STANDARD_DIALECT, JAVA_DIALECT, PYICEBERG_DIALECT])
def test_few_files_or_short_filters_keep_complete_residuals(dialect: ClientDialect) -> None:
    for file_count, where in ((5, build_in_filter(20_000)), (500, build_in_filter(100))):
        tasks, _ = write_and_measure_tasks(file_count, where, dialect)
        assert [task["residual-filter"] for task in tasks] == [where] * file_count


@pytest.mark.slow
@pytest.mark.parametrize("dialect", mark_fast([STANDARD_DIALECT, JAVA_DIALECT, PYICEBERG_DIALECT], 1))
def test_long_residuals_that_differ_by_partition_are_bounded_and_not_all_evaluated(dialect: ClientDialect) -> None:
    spec = (PartitionField(1000, "p", 1, "identity"),)
    terms = [{"type": "eq", "term": "c2", "value": f"value {number}"} for number in range(20_000)]
    filter_json: Any = {"type": "eq", "term": "c1", "value": -1}
    for term in terms:
        filter_json = {"type": "or", "left": filter_json, "right": term}
    tasks, size = write_and_measure_tasks(500, filter_json, dialect, spec=spec)
    assert size < BUDGET_BYTES
    assert all(("residual-filter" in task) is dialect.needs_residuals for task in tasks)
    assert not any(task.get("residual-filter") in (True, False) for task in tasks)


def test_long_value_does_not_lengthen_a_required_residual() -> None:
    tasks, _ = write_and_measure_tasks(500, {"type": "gt", "term": "c2", "value": "x" * 100_000}, PYICEBERG_DIALECT)
    assert tasks[0]["residual-filter"] == {"type": "not-null", "term": "c2"}


@pytest.mark.parametrize("dialect", mark_fast([STANDARD_DIALECT, JAVA_DIALECT, PYICEBERG_DIALECT], 1))
def test_exact_residuals_are_never_shortened(dialect: ClientDialect) -> None:
    tasks, _ = write_and_measure_tasks(500, build_in_filter(20_000), dialect, is_exact=True)
    assert [task["residual-filter"] for task in tasks] == [build_in_filter(20_000)] * 500


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("count", [10, 100, 1_000, 20_000, 190_000])
def test_exact_residuals_of_one_answer_stay_within_the_byte_limit(count: int) -> None:
    table = build_metadata((), kinds={1: "long"})
    plan = build_scan(table, [build_block([build_data_file("f")], 0)], where=build_in_filter(count))
    form = TaskForm(residual_bytes=BUDGET_BYTES, exact_residuals=True)
    files_max = ScanTaskWriter(plan, dialect=JAVA_DIALECT, form=form).files_max
    if files_max is not None:
        _, size = write_and_measure_tasks(files_max, build_in_filter(count), JAVA_DIALECT, is_exact=True)
        json_size = len(json.dumps(build_in_filter(count), separators=(",", ":")))
        assert files_max == 1 or files_max * json_size <= BUDGET_BYTES < (files_max + 1) * json_size
        # Each task has at most 1,000 bytes besides its residual.
        assert size < max(BUDGET_BYTES, json_size) + files_max * 1000
    assert (files_max is None) is (count <= 100), "an answer with short filters needs no limit"
    assert ScanTaskWriter(plan, dialect=JAVA_DIALECT, form=TaskForm(residual_bytes=BUDGET_BYTES)).files_max is None
    assert (
        ScanTaskWriter(plan, dialect=JAVA_DIALECT, form=TaskForm(residuals=False, exact_residuals=True)).files_max
        is None
    )


def test_residual_on_a_renamed_column_depends_on_the_client() -> None:
    """A residual has no names of the current schema if a column was renamed after the plan was made.

    Java gets the residual true. PyIceberg gets the whole filter, because it counts the rows of a file by its metadata
    if the residual is true. Other clients get no residual. In the standard, a missing residual means the filter.
    """
    metadata = build_metadata((), kinds={1: "long"})
    plan = build_scan(metadata, [build_block([build_data_file("f")], 0)], where=build_in_filter(3))
    [field] = metadata.current_schema.fields
    renamed_schema = replace(metadata.current_schema, fields=(replace(field, name="other"),))
    plan.metadata = replace(metadata, schemas=(renamed_schema,))
    residuals = {}
    for dialect in (STANDARD_DIALECT, JAVA_DIALECT, PYICEBERG_DIALECT):
        [task] = json.loads(b"[" + b"".join(ScanTaskWriter(plan, dialect=dialect).write_tasks(plan.entry_ids)) + b"]")
        residuals[dialect] = task.get("residual-filter")
    assert residuals == {STANDARD_DIALECT: None, JAVA_DIALECT: True, PYICEBERG_DIALECT: build_in_filter(3)}


def test_iceberg_java_client_is_recognised_by_its_headers() -> None:
    assert choose_dialect("Apache-HttpClient/5.5 (Java/21.0.1)") == JAVA_DIALECT
    assert choose_dialect("whatever", "Apache Iceberg 1.12.0 (commit 1)") == JAVA_DIALECT
    assert choose_dialect("DuckDB/1.5") == STANDARD_DIALECT
