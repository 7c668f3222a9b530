"""`seamark sql`: runs a statement on a suitable engine, and prints the rows.

The command is a client of the running server, which it finds by `--url` or in the server's `--home`. Exit codes: 0 on
success, 1 if the server refuses or cannot be reached, 2 for an invalid statement.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.csv
from rich.table import Table

from seamark.commands.connecting import add_suggestions, find_server_url, to_command_error
from seamark.commands.options import Misconfigured, parse_size, settings_flags
from seamark.commands.terminal import escape_for_terminal, open_console, show_count, show_size
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import ClientError, InvalidRequest
from seamark.connector.client.warehouses import make_warehouse_url
from seamark.connector.sql.choice import AUTO, ENGINES
from seamark.connector.sql.cubes.plans import CUBE_USES, ON
from seamark.connector.sql.rows import convert_to_json_rows
from seamark.connector.sql.session import CATALOG, ChosenPlan, Engines, SqlResult, SqlSession

TABLE_ROWS_MAX = 1000
"""The maximum number of rows that the format `table` prints.

The format computes the widths of its columns from all rows, so it has to keep them in memory.
"""


@click.command()
@click.argument("statement")
@click.option(
    "--format",
    "output",
    type=click.Choice(["table", "json", "csv", "arrow"]),
    help="Format of the rows. json prints one object on each line; arrow is an IPC stream. Default: table on a "
    "terminal, otherwise csv.",
)
@click.option("--json", "output", flag_value="json", help="Print JSON, like --format json.")
@click.option(
    "--explain",
    "explains",
    is_flag=True,
    help="Show the engine, the reason for it, the files and the bytes. Do not run the statement.",
)
@click.option(
    "--engine",
    type=click.Choice([AUTO, *ENGINES]),
    default=AUTO,
    show_default=True,
    help="Engine that runs the statement. auto chooses it by the kind of statement and the bytes that it reads.",
)
@click.option(
    "--trino",
    envvar="SEAMARK_SQL_TRINO",
    show_envvar=True,
    help="URL of Trino or of Seamark's proxy: http://user@host:port?catalog=name.",
)
@click.option(
    "--spark",
    envvar="SEAMARK_SQL_SPARK",
    show_envvar=True,
    help="Spark that runs MERGE: sc://host:port of Spark Connect, or a master such as local[2].",
)
@click.option("--spark-catalog", default=CATALOG, show_default=True, help="Name of the catalog in Spark.")
@click.option(
    "--large",
    "large",
    default="1GB",
    show_default=True,
    help="Size of the data files to read from which a query runs on Trino, if --trino is set.",
)
@click.option("--schema", help="Schema of tables whose names in the statement have no schema.")
@click.option(
    "--cubes",
    type=click.Choice(CUBE_USES),
    default=ON,
    show_default=True,
    help="Whether aggregates are answered from cubes. exact excludes sums of floats, and averages of floats or "
    "integers.",
)
@click.option("--on-s3", is_flag=True, help="State that the tables are in S3. Statements that write need it.")
@click.option("--catalog", default=CATALOG, show_default=True, help="Name of the catalog in statements.")
@click.option(
    "--warehouse", metavar="NAME", help="Further warehouse of the server. Default: the server's own warehouse."
)
@click.option(
    "--url",
    envvar="SEAMARK_URL",
    show_envvar=True,
    help="URL of the server. Default: the URL in the file server.json of --home.",
)
@click.option("--token", envvar="SEAMARK_TOKEN", help="Bearer token for the server. [SEAMARK_TOKEN]")
@settings_flags(("home",))
def sql(
    statement: str,
    output: str | None,
    explains: bool,
    engine: str,
    trino: str | None,
    spark: str | None,
    spark_catalog: str,
    large: str,
    schema: str | None,
    cubes: str,
    on_s3: bool,
    catalog: str,
    warehouse: str | None,
    url: str | None,
    token: str | None,
    config: Path | None,
    **flags: Any,
) -> None:
    """Run the SQL STATEMENT. If STATEMENT is -, read it from standard input.

    \b
    For instance:
      seamark sql "SELECT country, count(*) FROM shop.orders GROUP BY country"
      seamark sql --explain "SELECT * FROM shop.orders WHERE id = 7"
    """
    text = sys.stdin.read() if statement == "-" else statement
    engines = Engines(
        wanted=engine,
        trino=trino,
        trino_password=os.environ.get("SEAMARK_TRINO_PASSWORD"),
        spark=spark,
        spark_catalog=spark_catalog,
        large_bytes=parse_size(large, "--large"),
    )
    write = _WRITERS[output or ("table" if sys.stdout.isatty() else "csv")]
    try:
        server = make_warehouse_url(url or find_server_url(config, flags), warehouse)
        with (
            closing(SeamarkClient(server, token=token)) as client,
            add_suggestions(client),
            SqlSession(
                server, token=token, catalog=catalog, schema=schema, engines=engines, on_s3=on_s3, cubes=cubes
            ) as session,
        ):
            if explains:
                _show_plan(session.explain(text))
                return
            result = session.sql(text)
            try:
                write(result)
            finally:
                result.close()
    except ValueError as error:
        raise click.UsageError(escape_for_terminal(str(error))) from None
    except InvalidRequest as error:
        raise Misconfigured(escape_for_terminal(error.message)) from None
    except ClientError as error:
        raise to_command_error(error, has_token=token is not None) from None


def _show_plan(plan: ChosenPlan) -> None:
    """Print the plan of a statement: the engine, the reason for it, and the tables."""
    console = open_console()
    console.print(f"Engine: {plan.engine}, because {plan.why}.", markup=False, highlight=False)
    tables = Table()
    tables.add_column("table")
    for name in ("files", "of", "bytes", "columns"):
        tables.add_column(name, justify="right")
    tables.add_column("pruned by joins on")
    for table in plan.tables:
        joins = ", ".join(
            f"{columns} ({'attributes' if keys is None else show_count(keys, 'key')})" for columns, keys in table.joins
        )
        counts = (f"{table.files:,}", f"{table.considered_files:,}", show_size(table.bytes), str(table.columns))
        tables.add_row(table.shown_name.replace("[", "\\["), *counts, joins.replace("[", "\\["))
    if plan.tables:
        console.print(tables)
    if plan.cube is not None:
        # The groups of a cube answer for some files. The rows of the other files are read.
        row_files = show_count(plan.cube.row_files, "file")
        text = f"Cube: {plan.cube.index} answers {show_count(plan.cube.files, 'file')}; rows of {row_files} are read."
        if plan.cube.index is None:
            text = f"Cube: none, because {plan.cube.reason}; rows of {row_files} are read."
        console.print(escape_for_terminal(text), markup=False, highlight=False)


def _write_table(result: SqlResult) -> None:
    """Print the first rows of a result as a table."""
    values: list[list[Any]] = []
    for batch in result.batches:
        values += convert_to_json_rows(batch)
        if len(values) > TABLE_ROWS_MAX:
            break
    table = Table()
    for field in result.schema:
        is_number = (
            pa.types.is_integer(field.type) or pa.types.is_floating(field.type) or pa.types.is_decimal(field.type)
        )
        table.add_column(field.name.replace("[", "\\["), justify="right" if is_number else "left", overflow="fold")
    for row in values[:TABLE_ROWS_MAX]:
        table.add_row(*("" if cell is None else _format_cell(cell).replace("[", "\\[") for cell in row))
    console = open_console()
    console.print(table)
    if len(values) > TABLE_ROWS_MAX:
        console.print(f"Only the first {TABLE_ROWS_MAX:,} rows are shown; --format csv prints all rows.")


def _format_cell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _write_json(result: SqlResult) -> None:
    names = result.schema.names
    for batch in result.batches:
        for row in convert_to_json_rows(batch):
            click.echo(json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False))


def _write_csv(result: SqlResult) -> None:
    with pyarrow.csv.CSVWriter(sys.stdout.buffer, _flatten_schema(result.schema)) as writer:
        for batch in result.batches:
            writer.write_batch(_flatten_batch(batch))


def _write_arrow(result: SqlResult) -> None:
    with pa.ipc.new_stream(sys.stdout.buffer, result.schema) as writer:
        for batch in result.batches:
            writer.write_batch(batch)


def _is_nested(kind: pa.DataType) -> bool:
    return bool(pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_null(kind))


def _flatten_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema with strings instead of nested types, because CSV cannot represent nested types."""
    return pa.schema([field.with_type(pa.string()) if _is_nested(field.type) else field for field in schema])


def _flatten_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    schema = _flatten_schema(batch.schema)
    texts = {
        number: [None if row[number] is None else _format_cell(row[number]) for row in convert_to_json_rows(batch)]
        for number, field in enumerate(batch.schema)
        if _is_nested(field.type)
    }
    columns = [
        pa.array(texts[number], pa.string()) if number in texts else column
        for number, column in enumerate(batch.columns)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


_WRITERS: dict[str, Callable[[SqlResult], None]] = {
    "table": _write_table,
    "json": _write_json,
    "csv": _write_csv,
    "arrow": _write_arrow,
}
