"""Queries return the same rows with and without cubes while the schema and the partitions of the table change."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import date, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from pyiceberg.exceptions import CommitFailedException, RESTError, ValidationError
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import BucketTransform, IdentityTransform, MonthTransform, Transform
from pyiceberg.types import (
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    LongType,
    StringType,
    StructType,
    TimestampType,
)

import seamark.duckdb
from seamark.connector.client.errors import ClientError
from seamark.connector.client.indexes import IndexClient
from seamark.connector.cubes.summaries import OFF
from seamark.connector.index.builds import InProcessWorkers, build
from seamark.connector.plans.quotes import quote_name
from seamark.connector.sql.session import SqlSession
from seamark.connector.write.appends import append
from tests.connector.cubes.test_wide_sessions import compare_in_duckdb, compare_sessions
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread
from tests.connector.sql.test_cubes import server
from tests.seeds import first_seed

__all__ = ["server"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SCHEMA = pa.schema(
    [
        ("k", pa.int32()),
        ("n", pa.int64()),
        ("x", pa.float32()),
        ("price", pa.decimal128(9, 2)),
        ("name", pa.string()),
        ("day", pa.date32()),
        ("ts", pa.timestamp("us")),
        ("place", pa.struct([("x", pa.int32()), ("y", pa.string())])),
    ]
)
NAMES = ("k", "n", "name", "sum", "Count", "x y", "place", "new")
"""The names that columns get. Some of them are the names of other columns, or of functions."""
_NUMBERS = (IntegerType, LongType, FloatType, DoubleType, DecimalType)
_REFUSALS = (ClientError, RESTError, CommitFailedException, ValidationError, ValueError)
"""The errors of changes that the table does not permit."""


def draw_value(rng: random.Random, kind: pa.DataType) -> object:
    """Return a random value, or None."""
    if rng.random() < 0.12:
        return None
    if pa.types.is_struct(kind):
        return {field.name: draw_value(rng, field.type) for field in kind}
    if pa.types.is_decimal(kind):
        return Decimal(rng.randint(-5, 5)).scaleb(-kind.scale)
    if pa.types.is_integer(kind):
        return rng.choice((-1, 1, 2, 7))
    if pa.types.is_floating(kind):
        return rng.choice((0.0, -0.0, 1.5, float("nan"), float("inf")))
    if pa.types.is_date(kind):
        return date(2020, rng.choice((1, 2)), rng.choice((1, 15)))
    if pa.types.is_timestamp(kind):
        return datetime(2020, rng.choice((1, 2)), rng.choice((1, 15)), rng.choice((0, 23)))
    return rng.choice(("", "a", "A"))


class EvolvingTable:
    """A table with cubes whose columns, partitions, branches and rows change."""

    def __init__(self, url: str, client: IndexClient, rng: random.Random, name: str) -> None:
        self.name, self.cube_count = name, 0
        self._url, self._client, self._rng = url, client, rng
        self._versions: list[str] = []
        with open_catalog(url) as catalog:
            catalog.create_namespace_if_not_exists(name.rpartition(".")[0])
            catalog.create_table(name, schema=SCHEMA, properties={"write.delete.mode": "merge-on-read"})
        self._changes: list[Callable[[], None]] = [
            *(self.rename, self.exchange_names, self.promote, self.replace_column, self.change_partitions),
            *(self.add_tag_or_branch, self.delete, self.append, self.build, self.add_cube),
        ]

    @contextmanager
    def open_table(self) -> Iterator[Table]:
        with open_catalog(self._url) as catalog:
            yield catalog.load_table(self.name)

    def change(self) -> None:
        """Make a random change. The table may refuse it, for example because a column is in its partition spec."""
        with suppress(*_REFUSALS):
            self._rng.choice(self._changes)()

    def append(self) -> None:
        with self.open_table() as table:
            append(self._client, self.name, self._draw_rows(table.schema()))

    def build(self) -> None:
        for number in range(self.cube_count):
            with closing(InProcessWorkers()) as workers:
                build(self._client, self.name, f"cube{number}", workers)

    def add_cube(self) -> None:
        """Define a cube with one to three columns, and with `count(*)` and up to four other measures."""
        rng, dimensions, measures = self._rng, list[str](), {"count(*)"}
        with self.open_table() as table:
            fields = table.schema().fields
        for field in rng.sample(fields, rng.randint(1, 3)):
            match field.field_type:
                case StructType():
                    dimensions.append(f"{field.name}.{rng.choice(field.field_type.fields).name}")
                case DateType() | TimestampType():
                    dimensions.append(f"{rng.choice(('day', 'month'))}({field.name})")
                case _:
                    dimensions.append(field.name)
        for field in rng.sample(fields, rng.randint(1, 4)):
            functions = ("sum", "avg", "min", "max", "count") if isinstance(field.field_type, _NUMBERS) else ("max",)
            if not isinstance(field.field_type, StructType):
                measures.add(f"{rng.choice(functions)}({field.name})")
        self._client.put_index(
            self.name, f"cube{self.cube_count}", kind="cube", columns=dimensions, measures=sorted(measures)
        )
        self.cube_count += 1

    def rename(self) -> None:
        with self.open_table() as table, table.update_schema() as update:
            update.rename_column(self._draw_column(table.schema())[0], self._rng.choice(NAMES))

    def exchange_names(self) -> None:
        with self.open_table() as table:
            (first_name, _), (second_name, _) = self._draw_column(table.schema()), self._draw_column(table.schema())
        for old_name, new_name in ((first_name, "other"), (second_name, first_name), ("other", second_name)):
            with self.open_table() as table, table.update_schema() as update:
                update.rename_column(old_name, new_name)

    def promote(self) -> None:
        with self.open_table() as table, table.update_schema() as update:
            name, kind = self._draw_column(table.schema())
            match kind:
                case IntegerType():
                    update.update_column(name, field_type=LongType())
                case FloatType():
                    update.update_column(name, field_type=DoubleType())
                case DecimalType() if kind.precision < 30:
                    update.update_column(name, field_type=DecimalType(kind.precision + 8, kind.scale))

    def replace_column(self) -> None:
        """Replace a column by a new column with the same name."""
        with self.open_table() as table:
            name, kind = self._draw_column(table.schema())
            with table.update_schema() as update:
                update.delete_column(name)
        with self.open_table() as table, table.update_schema() as update:
            update.add_column(name, self._rng.choice((kind, LongType(), StringType())))

    def change_partitions(self) -> None:
        with self.open_table() as table, table.update_spec() as update:
            if table.spec().fields and self._rng.random() < 0.6:
                update.remove_field(self._rng.choice(table.spec().fields).name)
                return
            name, kind = self._draw_column(table.schema())
            has_months = isinstance(kind, DateType | TimestampType)
            transform: Transform[object, object] = MonthTransform() if has_months else BucketTransform(3)
            if self._rng.random() < 0.4:
                transform = IdentityTransform()
            update.add_field(name, transform, f"p{self._rng.randrange(10**6)}")

    def add_tag_or_branch(self) -> None:
        name = f"v{len(self._versions)}"
        with self.open_table() as table:
            snapshot = table.current_snapshot()
            assert snapshot is not None
            snapshots = table.manage_snapshots()
            if self._rng.random() < 0.5:
                snapshots.create_tag(snapshot.snapshot_id, name).commit()
            else:
                snapshots.create_branch(snapshot.snapshot_id, name).commit()
        self._versions.append(name)

    def delete(self) -> None:
        with self.open_table() as table, SqlSession(self._url) as session:
            names = [field.name for field in table.schema().fields if isinstance(field.field_type, LongType)]
            if not names:
                return
            name = self._rng.choice(names)
            session.sql(f"DELETE FROM {self.name} WHERE {quote_name(name)} = {self._rng.choice((1, 7))}").close()

    def draw_query(self, version_form: str) -> str:
        """Return a query with the columns and measures of a cube, by the names that they have in a snapshot.

        Args:
            version_form: The text that selects the snapshot `{}`.
        """
        rng, source = self._rng, self.name
        definition = self._client.index(self.name, f"cube{rng.randrange(self.cube_count)}").json
        keys = [_write_dimension(text) for text in definition["columns"]]
        values = [_write_measure(text) for text in definition["measures"]]
        with self.open_table() as table:
            if rng.random() < 0.3:
                source += version_form.format(rng.choice(table.snapshots()).snapshot_id)
            # DuckDB's form, AT, cannot select tags and branches.
            elif self._versions and "FOR" in version_form and rng.random() < 0.3:
                source += f" FOR VERSION AS OF '{rng.choice(self._versions)}'"
        keys = rng.sample(keys, rng.randint(0, len(keys)))
        text = f"SELECT {', '.join([*keys, *rng.sample(values, rng.randint(1, len(values)))])} FROM {source}"
        text += f" WHERE {rng.choice(keys)} IS NOT NULL" if keys and rng.random() < 0.3 else ""
        return text + (f" GROUP BY {', '.join(keys)}" if keys else "")

    def _draw_column(self, schema: Schema) -> tuple[str, IcebergType]:
        field = self._rng.choice(schema.fields)
        return field.name, field.field_type

    def _draw_rows(self, schema: Schema) -> pa.Table:
        kinds, count = schema.as_arrow(), self._rng.choice((1, 20))
        columns = [pa.array([draw_value(self._rng, kind) for _ in range(count)], kind) for kind in kinds.types]
        return pa.table(columns, schema=kinds)


def _write_dimension(text: str) -> str:
    """Return the SQL expression by which queries group a dimension.

    Queries group by month if the cube has the days or months of a column.
    """
    unit, bracket, column = text.removesuffix(")").partition("(")
    if not bracket:
        return _quote_path(text)
    return f"date_trunc('month', {_quote_path(column)})" if unit in ("day", "month") else text


def _write_measure(text: str) -> str:
    function, _, operand = text.removesuffix(")").partition("(")
    return text if operand == "*" else f"{function}({_quote_path(operand)})"


def _quote_path(path: str) -> str:
    return ".".join(quote_name(name.strip('`"')) for name in path.split("."))


def run_case(server: ServerThread, seed: int, queries: int) -> Counter[str]:
    """Change a table at random, and compare queries with and without cubes after each change."""
    rng, counts = random.Random(seed), Counter[str]()
    with (
        closing(IndexClient(server.url)) as client,
        SqlSession(server.url) as session,
        SqlSession(server.url, cubes=OFF) as plain_session,
        seamark.duckdb.connect(server.url) as con,
    ):
        table = EvolvingTable(server.url, client, rng, f"db.evolving{seed}")
        table.append()
        table.add_cube()
        table.add_cube()
        table.build()
        for _ in range(4):  # Later rounds query cubes that are older than several changes.
            for _ in range(rng.randint(1, 4)):
                table.change()
            for _ in range(queries):
                text = table.draw_query(" FOR VERSION AS OF {}")
                counts[compare_sessions(session, plain_session, text, f"seed {seed}: {text}")] += 1
                text = table.draw_query(" AT (VERSION => {})").replace(f" FROM {table.name}", f" FROM sea.{table.name}")
                counts[f"duckdb {compare_in_duckdb(con, text, f'seed {seed}: {text}')}"] += 1
    return counts


def test_queries_of_changing_schemas_return_the_same_rows_from_cubes(server: ServerThread) -> None:
    counts = Counter[str]()
    for seed in range(first_seed(), first_seed() + 40):
        counts += run_case(server, seed, 6)
    assert counts["cube"] + counts["cube and rows"] > counts.total() / 10, counts
    assert counts["duckdb cube"] + counts["duckdb cube and rows"] > counts.total() / 20, counts
