"""Comparison with Iceberg's Java library: it binds the same predicates, and reads the residuals that we write.

Java's literal parsers (`Literals`, `SingleValueParser`) and its folding run in one JVM for the whole module; the
`java` launcher compiles their source.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyspark
import pytest

from seamark.formats.iceberg.expressions.binding import bind
from seamark.formats.iceberg.expressions.expression_json import encode_expression, parse_expression
from seamark.formats.iceberg.types.reading import convert_json_value
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.runtime.errors import BadRequest
from tests.iceberg.samples import build_field, build_schema
from tests.services.java import SHORT_LIVED, find_java_17
from tests.services.process import CACHE

SOURCE = """
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import org.apache.iceberg.Schema;
import org.apache.iceberg.SchemaParser;
import org.apache.iceberg.expressions.Binder;
import org.apache.iceberg.expressions.Expression;
import org.apache.iceberg.expressions.ExpressionParser;
import org.apache.iceberg.expressions.Expressions;

public class Binds {
  public static void main(String[] args) throws Exception {
    BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
    Schema schema = SchemaParser.fromJson(in.readLine());
    for (String line = in.readLine(); line != null; line = in.readLine()) {
      try {
        Expression sent = Expressions.rewriteNot(ExpressionParser.fromJson(line));
        out.println(ExpressionParser.toJson(Binder.bind(schema.asStruct(), sent, true)));
      } catch (RuntimeException refused) {
        out.println("{\\"refused\\": \\"" + refused.getClass().getSimpleName() + "\\"}");
      }
    }
  }
}
"""

LITERALS: dict[str, list[Any]] = {
    "boolean": [True, False],
    "int": [0, -5, 2**31 - 1, -(2**31)],
    "long": [0, 2**63 - 1, -(2**63)],
    "float": [0.1, -0.5, 16_777_217.0, 3, 3.4028234663852886e38],
    "double": [0.1, -0.5, 1e300, 2**53],
    "decimal(9, 2)": ["1.25", "-0.05", "100.00", 7, 0.125, -1.005, 2.5],
    "date": [0, -1, 19_000, 2_932_897, "2024-01-02", "1969-12-31"],
    "time": [0, 3_723_000_004, "01:02:03", "23:59:59.999999"],
    "timestamp": [0, -1, 1_700_000_000_000_001, "2024-01-02T03:04:05.000006", "1960-01-01T00:00:00"],
    "timestamptz": [0, -1, 2**60, "2024-01-02T03:04:05+00:00", "2024-01-02T03:04:05.5-05:30"],
    "timestamp_ns": [0, 1_700_000_000_000_001, "2024-01-02T03:04:05.000000006"],
    "timestamptz_ns": [5, "2024-01-02T03:04:05.000000006Z"],
    "string": ["", "ä\U0001f600", "2024-01-02"],
    "uuid": ["f79c3e09-677c-4bbd-a479-3f349cb785e7"],
    "fixed[2]": ["01ff", "AB00"],
    "binary": ["", "01ff"],
}
REFUSED_LITERALS: dict[str, list[Any]] = {
    "boolean": [1, 0.5],
    "int": ["x", True],
    "long": [True],
    "decimal(9, 2)": ["x", True],
    "date": ["x", "2024-02-30", 0.5, False],
    "time": ["25:00:00", 0.5],
    "timestamp": ["2024-01-02T03:04:05+00:00", 0.5],
    "timestamptz": ["x", True],
    "string": [5, True],
    "uuid": ["x", 5],
    "fixed[2]": ["01", 5],
    "binary": ["0", True],
}
NAMES = {kind: f"c{position}" for position, kind in enumerate(LITERALS)}
SCHEMA = build_schema(
    *(build_field(ident, NAMES[kind], kind) for ident, kind in enumerate(LITERALS, start=1)),
    build_field(51, "must", "long", True),
    build_field(
        52,
        "st",
        {"type": "struct", "fields": [build_field(53, "a", "long", True), build_field(54, "b", "double")]},
        True,
    ),
    build_field(55, "maybe", {"type": "struct", "fields": [build_field(56, "a", "timestamptz", True)]}),
    build_field(57, "none", "unknown"),
)
SEAMARK_SCHEMA = convert_json_value(SCHEMA, Schema, "schema")

AT_ONCE = 100
"""The number of lines sent before answers are read, small enough that neither pipe fills up."""

Java = Callable[[Sequence[Any]], list[Any]]


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Java]:
    """Return a function that returns, for each filter, Java's bound form as JSON, or the exception that Java threw."""
    source = tmp_path_factory.mktemp("java") / "Binds.java"
    source.write_text(SOURCE)
    jars = [
        *sorted((CACHE / "jars").glob("iceberg-spark-runtime-*.jar"))[-1:],
        *(Path(pyspark.__file__).parent / "jars").glob("slf4j-api-*.jar"),
    ]
    assert len(jars) == 2, "run `make jars`"
    argv = [find_java_17(), "-Xmx256m", *SHORT_LIVED, "-cp", ":".join(map(str, jars)), str(source)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        stdin, stdout = child.stdin, child.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(SCHEMA).encode() + b"\n")

        def bind_all(filters: Sequence[Any]) -> list[Any]:
            answers = []
            for start in range(0, len(filters), AT_ONCE):
                batch = filters[start : start + AT_ONCE]
                stdin.write("".join(json.dumps(line) + "\n" for line in batch).encode())
                stdin.flush()
                answers += [json.loads(stdout.readline()) for _ in batch]
            return answers

        yield bind_all
        stdin.close()


def bind_as_json(filter_json: Any) -> Any:
    return encode_expression(
        bind(parse_expression(filter_json), SEAMARK_SCHEMA, (SEAMARK_SCHEMA,), case_sensitive=True)
    )


def normalize_answer(kind: str, answer: Any) -> Any:
    """Return Java's JSON in the form of Seamark's JSON: with padded fractions, approximate floats and sorted values."""

    def normalize_value(json_value: Any) -> Any:
        if kind == "float":
            return pytest.approx(json_value, rel=1e-7)  # A float has about seven decimal digits.
        if isinstance(json_value, str) and "time" in kind and "." in json_value:
            body, zone = (json_value[:-6], "+00:00") if "tz" in kind else (json_value, "")
            integer_part, fraction = body.split(".")
            return f"{integer_part}.{fraction.ljust(6, '0') if len(fraction) <= 6 else fraction.ljust(9, '0')}{zone}"
        return json_value

    if not isinstance(answer, dict):
        return answer
    if "values" in answer:
        return {**answer, "values": sorted(normalize_value(item) for item in answer["values"])}
    return {**answer, "value": normalize_value(answer["value"])} if "value" in answer else answer


COMPARISONS = ["lt", "lt-eq", "gt", "gt-eq", "eq", "not-eq"]


def test_java_binds_every_literal_to_the_same_value_and_reads_our_json(java: Java) -> None:
    cases = [
        (kind, {"type": op, "term": NAMES[kind], "value": literal})
        for kind, literals in LITERALS.items()
        for literal in literals
        for op in COMPARISONS
    ]
    negated = [(kind, {"type": "not", "child": filter_json}) for kind, filter_json in cases]
    filters = [*cases, *negated]
    seamark_jsons = [bind_as_json(filter_json) for _, filter_json in filters]
    answers = java([filter_json for _, filter_json in filters])
    answers_to_seamark = java(seamark_jsons)
    for (kind, filter_json), seamark_json, answer, answer_to_seamark in zip(
        filters, seamark_jsons, answers, answers_to_seamark, strict=True
    ):
        assert seamark_json == normalize_answer(kind, answer), filter_json
        assert seamark_json == normalize_answer(kind, answer_to_seamark), filter_json


def test_java_binds_every_set_to_the_same_values_and_reads_our_json(java: Java) -> None:
    kinds = [kind for kind, literals in LITERALS.items() if kind != "float" and len(set(map(str, literals))) > 1]
    filters = [
        {"type": op, "term": NAMES[kind], "values": LITERALS[kind] * 2} for kind in kinds for op in ("in", "not-in")
    ]
    seamark_jsons = [bind_as_json(filter_json) for filter_json in filters]
    for kind, seamark_json, answer, answer_to_seamark in zip(
        [kind for kind in kinds for _ in range(2)], seamark_jsons, java(filters), java(seamark_jsons), strict=True
    ):
        assert (
            normalize_answer(kind, seamark_json)
            == normalize_answer(kind, answer)
            == normalize_answer(kind, answer_to_seamark)
        )


def test_java_rejects_the_same_literals(java: Java) -> None:
    filters = [
        {"type": "lt", "term": NAMES[kind], "value": literal}
        for kind, literals in REFUSED_LITERALS.items()
        for literal in literals
    ]
    for filter_json, answer in zip(filters, java(filters), strict=True):
        assert "refused" in answer, filter_json
        with pytest.raises(BadRequest):
            bind_as_json(filter_json)


def test_null_checks_and_term_names_equal_those_of_java(java: Java) -> None:
    term: Any
    filters: list[Any] = []
    for name in ("must", "st", "st.a", "st.b", "maybe", "maybe.a", "none", NAMES["string"]):
        filters += [{"type": op, "term": name} for op in ("is-null", "not-null")]
        filters += [{"type": "not", "child": {"type": "is-null", "term": name}}]
    filters += [{"type": op, "term": NAMES["double"]} for op in ("is-nan", "not-nan")]
    for transform, source, literal in (
        ("bucket[4]", "must", 3),
        ("truncate[10]", "must", 20),
        ("truncate[2]", NAMES["string"], "ab"),
        ("day", "maybe.a", 19_000),
        ("day", "maybe.a", "2022-01-08"),
        ("month", NAMES["date"], 5),
        ("hour", NAMES["timestamp_ns"], -1),
        ("year", NAMES["timestamptz"], 50),
    ):
        term = {"type": "transform", "transform": transform, "term": source}
        filters += [{"type": op, "term": term, "value": literal} for op in COMPARISONS]
        filters += [{"type": "is-null", "term": term}, {"type": "not-null", "term": term}]
    filters += [{"type": op, "term": NAMES["string"], "value": "ä"} for op in ("starts-with", "not-starts-with")]
    seamark_jsons = [bind_as_json(filter_json) for filter_json in filters]
    for filter_json, seamark_json, answer, answer_to_seamark in zip(
        filters, seamark_jsons, java(filters), java(seamark_jsons), strict=True
    ):
        assert seamark_json == answer, filter_json
        assert seamark_json == answer_to_seamark, filter_json


def test_java_rejects_the_same_predicates(java: Java) -> None:
    year = {"type": "transform", "transform": "year", "term": "must"}
    filters: list[Any] = [
        {"type": "is-nan", "term": "must"},
        {"type": "starts-with", "term": "must", "value": "5"},
        {"type": "lt", "term": "st", "value": 5},
        {"type": "lt", "term": "nowhere", "value": 5},
        {"type": "eq", "term": year, "value": 5},
        {"type": "like", "term": "must", "value": "5"},
        {"type": "is-null", "term": "must", "value": 5},
        {"type": "in", "term": "must", "value": 5},
        {"type": "eq", "term": "must", "value": None},
    ]
    for filter_json, answer in zip(filters, java(filters), strict=True):
        assert "refused" in answer, filter_json
        with pytest.raises(BadRequest):
            bind_as_json(filter_json)
