"""`seamark explain`: shows each stage of a scan plan.

The command is a client of the running server, which it finds by `--url` or in the server's `--home`. Exit codes: 0 on
success, 1 if the server refuses or cannot be reached, 2 for invalid arguments or an invalid predicate, 3 if no part of
the predicate could be used.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import click
from rich.table import Table

from seamark.commands.catalog.expression_text import format_expression
from seamark.commands.connecting import server_command
from seamark.commands.options import parse_time_ms
from seamark.commands.terminal import escape_for_terminal, make_table, open_console, print_json, show_count, show_size
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.names import join_name, split_name
from seamark.connector.client.queries import ExplainedQuery, explain_query
from seamark.connector.client.values import CURRENT, At, Explanation
from seamark.formats.iceberg.metadata.clustering import COLUMNS as CLUSTERING
from seamark.formats.iceberg.types.functions import is_function
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.index.keys.terms import format_term

_SHOWN_FILES_DEFAULT = 20
_NOTHING_USED = 3
_SHOWN_LAYOUTS_MAX = 2
_QUERY = re.compile(r"\s*(select|with)\s", re.IGNORECASE)


@click.command()
@click.argument("table", required=False)
@click.argument("predicate", required=False)
@click.option(
    "--sql", "query", metavar="QUERY", help="SQL query. Explain the scan of each of its tables, instead of TABLE."
)
@click.option(
    "--dialect",
    type=click.Choice(("trino", "duckdb")),
    default="trino",
    show_default=True,
    help="With --sql: the dialect of the query. Most of Spark's SQL is parsed as Trino's.",
)
@click.option(
    "--namespace", default="", metavar="A.B", help="With --sql: the namespace of table names without a namespace."
)
@click.option(
    "--join",
    "joins",
    type=json.loads,
    multiple=True,
    metavar="JSON",
    help="Join of TABLE with another table, as the JSON of a request for a plan table. Repeatable.",
)
@click.option("--files", "files", is_flag=True, help="List the remaining files.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=_SHOWN_FILES_DEFAULT,
    show_default=True,
    help="Maximum number of files to list.",
)
@click.option("--ref", help="Branch or tag to scan.")
@click.option("--snapshot-id", type=int, metavar="ID", help="Snapshot to scan. Default: the current snapshot.")
@click.option(
    "--as-of",
    "as_of_ms",
    metavar="TIME",
    callback=lambda context, option, text: None if text is None else parse_time_ms(text, "--as-of"),
    help="Scan the snapshot that was current at this time: milliseconds since the epoch, or a time such as "
    "2026-01-31T12:00 (in UTC, unless it has a zone).",
)
@server_command
def explain(
    client: IndexClient,
    table: str | None,
    predicate: str | None,
    query: str | None,
    dialect: str,
    namespace: str,
    joins: tuple[Any, ...],
    files: bool,
    limit: int,
    ref: str | None,
    snapshot_id: int | None,
    as_of_ms: int | None,
    as_json: bool,
) -> None:
    """Show how a scan of TABLE with the SQL condition PREDICATE is planned: files and bytes after each stage.

    With --sql, show this for each table of a query, with the conditions and joins that follow from the query. The query
    is not run.

    \b
    For instance:
      seamark explain sales.orders "day >= DATE '2024-01-01' AND customer = 42" --files
      seamark explain sales.orders --join \\
        '{"table": ["sales", "days"], "on": {"day": "date"}, "predicate": "holiday"}'
      seamark explain --sql "SELECT sum(price) FROM sales.orders o JOIN sales.days d \\
        ON o.day = d.date WHERE d.holiday"
    TABLE is a namespace and a name, joined by dots; write a dot within a name as \\. .
    """
    snapshot_choice = At(snapshot_id, ref, as_of_ms)
    if (table is None) == (query is None):
        raise click.UsageError("There is nothing to explain: name a TABLE, or set --sql to a query")
    if query is not None:
        if joins or files or snapshot_choice != CURRENT:
            raise click.UsageError(
                "--join, --files, --ref, --snapshot-id and --as-of cannot be set with --sql; set them with a TABLE"
            )
        explanation_of_query = explain_query(
            client, query, dialect=dialect, namespace=split_name(namespace) if namespace else ()
        )
        if as_json:
            print_json(explanation_of_query.json)
        else:
            _show_query(explanation_of_query)
        return
    assert table is not None
    if predicate is not None and _QUERY.match(predicate):
        raise click.UsageError("PREDICATE is a whole query: use --sql QUERY, without a TABLE")
    explanation = client.explain(
        table, predicate, at=snapshot_choice, files=files, limit=limit if files else None, joins=joins
    )
    if as_json:
        print_json(explanation.json)
    else:
        _print_explanation(table, explanation)
    if explanation.not_used and not explanation.columns:
        raise SystemExit(_NOTHING_USED)


def _show_query(query_explanation: ExplainedQuery) -> None:
    """Print the plan of each table reference, and then one line for all references."""
    console = open_console()
    for table in query_explanation.tables:
        console.rule(escape_for_terminal(table.reference), align="left", characters="─")
        condition = "none on its own columns that could leave files out" if table.predicate is None else table.predicate
        console.print(f"Condition: {condition}", highlight=False, markup=False)
        _print_explanation(join_name(table.table), table.plan, is_whole=False)
        console.print()
    parts = (
        f"{table.reference} {table.plan.files:,} of {_count_considered(table.plan):,}"
        for table in query_explanation.tables
    )
    console.print(f"Files to read: {', '.join(parts)}.", highlight=False, markup=False)


def _count_considered(explanation: Explanation) -> int:
    return explanation.stages[0].files_in if explanation.stages else explanation.files


def _print_explanation(table: str, explanation: Explanation, *, is_whole: bool = True) -> None:
    """Print an explanation.

    Args:
        table: The name of the table.
        explanation: The explanation.
        is_whole: Whether the reader checks only the explained predicate. The reader of a query may check further
            conditions.
    """
    console = open_console()
    console.print(
        make_table(
            ("stage", "files in", "removed", "left", "bytes left", "time"),
            (
                (
                    stage.name + ("" if stage.complete else " (out of time)"),
                    *(f"{count:,}" for count in (stage.files_in, stage.files_removed, stage.files_left)),
                    show_size(stage.bytes_left),
                    _format_time(stage.microseconds),
                )
                for stage in explanation.stages
            ),
            right_aligned_headers=("files in", "removed", "left", "bytes left", "time"),
            title=_make_title(explanation),
        )
    )
    for index in explanation.indexes:
        left_out = f"{index['files-removed']:,} of {show_count(index['files-in'], 'file')}"
        console.print(f"Index {index['name']} ({index['kind']}) left out {left_out}.", markup=False)
    for join in explanation.joins:
        outcome = _describe_join(join)
        console.print(f"Join with {'.'.join(join['table'])}: {outcome}.", highlight=False, markup=False)
    for reason in explanation.unpruned_reasons:
        console.print(f"All files are read: {reason}.", highlight=False, markup=False)
    console.print(
        f"To read: {show_count(explanation.files, 'file')}, {show_size(explanation.bytes)}, "
        f"{show_count(explanation.records, 'record')}; {show_count(explanation.delete_files, 'delete file')} "
        f"{'applies' if explanation.delete_files == 1 else 'apply'}.",
        highlight=False,
        markup=False,
    )
    if explanation.columns:
        columns = ", ".join(f"{column['name']} ({column['type']})" for column in explanation.columns)
        console.print(f"Compared: {columns}", highlight=False, markup=False)
    for part, reason in zip(explanation.not_used, explanation.not_used_reasons, strict=True):
        console.print(f"Not used: {part}: {reason}.", highlight=False, markup=False)
    for sentence in suggest_improvements(table, explanation):
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)
    for residual in explanation.residuals if explanation.files else ():
        files = show_count(residual["files"], "file")
        if residual["residual"] is True:
            if not is_whole:
                continue
            text = f"Nothing to check in {files}: all rows match."
            if explanation.not_used:
                text = f"Readers check the rows of {files} by what is not used."
        else:
            text = f"Readers check the rows of {files} by: {format_expression(residual['residual'])}"
            text += ", and by what is not used" if explanation.not_used else ""
        console.print(text, highlight=False, markup=False)
    if not explanation.residuals_complete:
        console.print("… and more in other partitions.")
    if explanation.kept_files is not None:
        console.print(_describe_files(explanation))


def suggest_improvements(table: str, explanation: Explanation) -> Iterator[str]:
    """Yield texts about each term that prunes few files, with a command that would help."""
    if explanation.files <= 1:
        return
    indexes_by_name = {index["name"]: index for index in explanation.indexes}
    table = shlex.quote(table)
    predicates_by_column = Counter(term["column"] for term in explanation.terms)
    for term in explanation.terms:
        if term.get("filter", {}).get("type") == "not-null" and predicates_by_column[term["column"]] > 1:
            continue  # The reported terms include a comparison of the column, which implies that it is not null.
        name, files_in, left = term["column"], term["files-in"], term["files-left"]
        index = indexes_by_name.get(term["index"])
        if left <= max(1, files_in // 2) or (index is not None and index["files-removed"]):
            continue  # The term prunes at least half of the files, or an index prunes files by it.
        # Quote the name: a writer of the table chose it, and a reader may copy the command into a shell.
        compared_term = term.get("filter", {}).get("term")
        function = compared_term.get("transform", IDENTITY) if isinstance(compared_term, dict) else IDENTITY
        column = shlex.quote(format_term(function if is_function(function) else IDENTITY, name))
        reason = f"by the bounds of {name}, {left:,} of {show_count(files_in, 'file')} may contain a matching row"
        if not term["has-bounds"]:
            reason = f"no file has bounds of {name}"
        if is_function(function):
            reason = f"bounds of {name} say nothing about {function}({name})"
            name = f"{function}({name})"
        yield f"{name} {'did not prune' if left == files_in else 'prunes little'}: {reason}."
        if term["index"] is not None:
            yield f"  The index {term['index']} is on {name}; its coverage: seamark index list {table}"
        elif term["index-kind"] is not None:
            command = f"seamark index create {table} --kind {term['index-kind']} --columns {column}"
            if term["index-files"] is None:
                yield f"  The number of files that an index would keep is unknown ({term['index-note']}): {command}"
            else:
                yield f"  With an index the plan would keep about {show_count(term['index-files'], 'file')}: {command}"
        elif term["index-files"] is not None:
            yield (
                "  An index would not help, because about "
                f"{show_count(term['index-files'], 'file')} contain a matching row."
            )
    for unknown in explanation.unknown_layouts:
        yield f"The effect of a layout by {unknown['column']} is unknown: {unknown['reason']}."
    for layout in explanation.layouts[:_SHOWN_LAYOUTS_MAX]:
        columns = ", ".join(layout["columns"])
        layout_text = f"Sorted by {columns}" if len(layout["columns"]) == 1 else f"Clustered by {columns}"
        setting = shlex.quote(f"{CLUSTERING}={','.join(layout['columns'])}")
        files = f"{layout['files']:,} of {show_count(layout['files-in'], 'file')}"
        yield f"{layout_text}, a scan of the table would read about {files}: seamark table set {table} {setting}"


def _describe_join(join: Mapping[str, Any]) -> str:
    """Return how a plan used a join."""
    if not join["used"]:
        return f"left out, {join['reason']}"
    indexes = join.get("indexes", [])
    parts = [f"the condition is evaluated by {', '.join(indexes)}"] if indexes else []
    return "; ".join(parts if join["keys"] is None else [*parts, show_count(join["keys"], "key")])


def _make_title(explanation: Explanation) -> str:
    return "No snapshot" if explanation.snapshot_id is None else f"Snapshot {explanation.snapshot_id}"


def _describe_files(explanation: Explanation) -> Table:
    assert explanation.kept_files is not None
    return make_table(
        ("file", "partition", "records", "size", "delete files"),
        (
            (
                file["file-path"],
                ", ".join(f"{name}={value}" for name, value in file["partition"].items()),
                f"{file['record-count']:,}",
                show_size(file["file-size-in-bytes"]),
                f"{file['delete-files']:,}",
            )
            for file in explanation.kept_files
        ),
        right_aligned_headers=("records", "size", "delete files"),
        title=f"The first {len(explanation.kept_files):,} of {show_count(explanation.files, 'file')}",
    )


def _format_time(microseconds: int) -> str:
    return f"{microseconds:,} µs" if microseconds < 10_000 else f"{microseconds / 1000:,.0f} ms"
