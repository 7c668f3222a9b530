"""Which of 119 queries, and of the 99 queries of TPC-DS, read fewer files in DuckDB with Seamark?

Run `python -m bench.corpus.run [--quick]`. DuckDB's own Iceberg reader and `seamark.duckdb` run each query, and both
must return the same rows. The benchmark compares the numbers of data files that DuckDB's profile reports as read.
DuckDB's own reader prunes files by column bounds, and by the bounds of the other side of a join. "all files" counts the
files of the tables of a query, once for each reference. "needed" is the smallest number of files that any reader must
read (`needed.py`). For each query that does not gain, and for each table of which all files are read, `explain` and
`seamark.duckdb.rewrite_query` must state a reason. The benchmark measures no times. `--share` sets the share of the
rows and files to write; results are saved only with the default.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

import seamark.duckdb
from bench.corpus import tpcds
from bench.corpus.lakes import FACT_FILES, NAMESPACES, create_star_schemas, list_data_files
from bench.corpus.needed import TableCopies, count_rows
from bench.report import OURS, AnswersDiffer, Report, Row
from bench.run import build_parser, choose_benchmarks, run_benches
from bench.ssb.queries import QUERIES
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.queries import ExplainedTable, explain_query
from seamark.connector.client.values import Explanation
from seamark.connector.plans.rewrites import MAX_KEPT_FRACTION
from tests.services.seamark import Seamark

PEER = "duckdb"
ALL_FILES = "all files"
NEEDED_FILES = "needed"
SAMPLE_SHARE = 0.3
QUICK_SHARE = 0.03
ANALYSIS_MS = 50.0
_TPCH = Path(__file__).parents[2] / "tests" / "deploy" / "tpch.sql"
_RETAIL = Path(__file__).with_name("retail_queries.sql")
_NOT_A_COMMENT = re.compile(r"^(?!--).+$", re.MULTILINE)
_TITLE = re.compile(r"^-- (.+)$", re.MULTILINE)


class ReasonMissing(Exception):
    """A table is read completely, and `explain` states no reason."""


@dataclass(frozen=True)
class CorpusQuery:
    """A query, with its title and the schema of its tables."""

    schema: str
    title: str
    text: str


def list_queries() -> list[CorpusQuery]:
    parts = [item for item in _TPCH.read_text().split(";") if item.strip()]
    queries = [CorpusQuery("tpch", f"TPC-H {number}", _strip_comments(part)) for number, part in enumerate(parts, 1)]
    queries += [CorpusQuery("ssb", f"SSB {name}", text) for name, text in QUERIES.items()]
    for part in _RETAIL.read_text().split(";"):
        if part.strip():
            queries.append(
                CorpusQuery("retail", f"retail: {_TITLE.findall(part)[-1].rstrip('.')}", _strip_comments(part))
            )
    return queries


def _strip_comments(part: str) -> str:
    return "\n".join(_NOT_A_COMMENT.findall(part)).strip()


@dataclass(frozen=True)
class CorpusMeasurement:
    """The numbers of files that a query reads: all files, with DuckDB alone, with Seamark, and the needed files."""

    query: CorpusQuery
    all_files: int
    duckdb: int
    kept_files: int
    needed_files: int | None
    outcome: str
    """The result of the planning, and the conditions and joins of the tables."""
    filtered_fact_references: int = 0
    """The number of references to fact tables of TPC-DS for which the plan has a condition or a join."""
    fact_references: int = 0
    """The number of all references to fact tables of TPC-DS."""

    @property
    def row(self) -> Row:
        values = {OURS: float(self.kept_files), PEER: float(self.duckdb), ALL_FILES: float(self.all_files)}
        if self.needed_files is not None:
            values[NEEDED_FILES] = float(self.needed_files)
        return Row(self.query.title, "files", "files", values, peer=PEER)


async def run(folder: Path, *, quick: bool = False, share: float = SAMPLE_SHARE) -> Report:
    share = QUICK_SHARE if quick else share
    title = "Which queries on star schemas read fewer files in DuckDB?"
    report = Report("corpus", title, peer="DuckDB's own Iceberg reader")
    tpcds_connection = None if quick else tpcds.open_tpcds_connection()
    tpcds_results: list[CorpusMeasurement] = []
    with Seamark(folder / "seamark", env={"SEAMARK_LOG_LEVEL": "warning"}) as server:
        create_star_schemas(server, folder, share=share)
        with closing(seamark.duckdb.connect(server.base_url)) as con, closing(SeamarkClient(server.base_url)) as client:
            con.execute("PRAGMA enable_profiling = 'no_output'")
            with closing(TableCopies(list_data_files(server))) as copies:
                results = [_measure_query(con, client, query, copies) for query in list_queries()]
            if tpcds_connection is not None:
                tpcds.create_tpcds_tables(tpcds_connection, server, share=share)
                texts = tpcds.read_texts(tpcds_connection)
                tpcds_queries = [
                    CorpusQuery(tpcds.NAMESPACE, f"TPC-DS {number}", text) for number, text in texts.items()
                ]
                tpcds_results = [_measure_query(con, client, query) for query in tpcds_queries]
    parts = {item: [result for result in results if result.query.schema == item] for item in NAMESPACES}
    for name, part in {"all": results, **parts}.items():
        report.rows += _sum_rows(f"{name}: {len(part)} queries", part)
    if tpcds_connection is not None:
        report.rows += _list_tpcds_rows(f"tpcds: {len(tpcds_results)} queries", tpcds_results, tpcds_connection)
        tpcds_connection.close()
    bench_results = [*results, *tpcds_results]
    report.rows += [item.row for item in bench_results]
    report.notes.append(f"Facts lie in {max(8, round(FACT_FILES * share))} files. The queries without fewer files:")
    report.notes += [f"{item.query.title}: {item.outcome}" for item in bench_results if item.kept_files >= item.duckdb]
    return report


def _sum_rows(case: str, part: Sequence[CorpusMeasurement]) -> Iterator[Row]:
    """Yield the rows with the totals of the queries in `part`."""
    pruned_count, fewer_count = (
        sum(item.kept_files < item.all_files for item in part),
        sum(item.kept_files < item.duckdb for item in part),
    )
    pruned_by_duckdb = sum(item.duckdb < item.all_files for item in part)
    yield Row(case, "read fewer than all files", "queries", {OURS: pruned_count, PEER: pruned_by_duckdb}, False, PEER)
    yield Row(case, "read fewer files than DuckDB alone", "queries", {OURS: fewer_count}, False, PEER)
    sums = {OURS: sum(item.kept_files for item in part), PEER: sum(item.duckdb for item in part)}
    sums[ALL_FILES] = sum(item.all_files for item in part)
    if any(item.needed_files is None for item in part):
        yield Row(case, "files read", "files", sums, peer=PEER)
        return
    sums[NEEDED_FILES] = sum(item.needed_files or 0 for item in part)
    yield Row(case, "files read", "files", sums, peer=PEER)
    fewest = {OURS: sum(item.kept_files <= (item.needed_files or 0) for item in part)}
    fewest[PEER] = sum(item.duckdb <= (item.needed_files or 0) for item in part)
    yield Row(case, "read the fewest files possible", "queries", fewest, False, PEER)


def _list_tpcds_rows(
    case: str, part: Sequence[CorpusMeasurement], tpcds_connection: duckdb.DuckDBPyConnection
) -> Iterator[Row]:
    """Yield the rows of the report for the queries of TPC-DS.

    One row counts how often the queries name a fact table, and for how many of these references Seamark finds a
    condition or a join that can leave out files.
    """
    yield from _sum_rows(case, part)
    reference_counts: dict[str, float] = {
        OURS: sum(item.filtered_fact_references for item in part),
        ALL_FILES: sum(item.fact_references for item in part),
    }
    yield Row(case, "references to facts with a filter", "references", reference_counts, False)
    slowest = max(tpcds.measure_analysis_ms(tpcds_connection, item.query.text) for item in part)
    yield Row(case, "CPU time of the slowest analysis", "ms", {OURS: slowest}, goal=ANALYSIS_MS)


def _measure_query(
    con: duckdb.DuckDBPyConnection, client: SeamarkClient, query: CorpusQuery, copies: TableCopies | None = None
) -> CorpusMeasurement:
    """Run the query with and without Seamark, and compare the files read.

    If `copies` is given, its copies of the rows give the number of needed files.
    """
    con.execute(f"USE sea.{query.schema}")
    rows, duckdb_files = _answer_query(con, query.text)
    query_files = None if copies is None else copies.count_needed_files(query.schema, query.text, rows)
    needed_files = None if query_files is None else sum(query_files)
    rewrite = seamark.duckdb.rewrite_query(con, query.text)
    kept_files, outcome = duckdb_files, rewrite.summary.removeprefix("unchanged; ")
    if rewrite.statement is not None:
        our_rows, kept_files = _answer_query(con, rewrite.statement)
        if our_rows != rows:
            raise AnswersDiffer(f"{query.title}: {query.text}\nbecame\n{rewrite.statement}")
        # `run` reports the outcome only if Seamark keeps no fewer files than DuckDB.
        outcome = "DuckDB leaves the same files out by column bounds"
    try:
        tables = explain_query(client, query.text, dialect="duckdb", namespace=(query.schema,)).tables
    except InvalidRequest as error:
        return CorpusMeasurement(
            query, duckdb_files, duckdb_files, kept_files, needed_files, f"{error.message}; {outcome}"
        )
    for table in tables:
        if table.plan.files > MAX_KEPT_FRACTION * _count_considered(table.plan) and not table.plan.unpruned_reasons:
            raise ReasonMissing(f"{query.title}: {table.reference}")
    candidate_count = sum(_count_considered(table.plan) for table in tables)
    descriptions = ", ".join(map(_describe_table, tables, query_files or [None] * len(tables)))
    facts = [table for table in tables if table.table[-1] in tpcds.FACTS]
    filtered_count = sum(fact.predicate is not None or bool(fact.plan.joins) for fact in facts)
    return CorpusMeasurement(
        query,
        candidate_count,
        duckdb_files,
        kept_files,
        needed_files,
        f"{outcome} ({descriptions})",
        filtered_count,
        len(facts),
    )


def _describe_table(table: ExplainedTable, needed_files: int | None) -> str:
    files = f"{table.plan.files} of {_count_considered(table.plan)} files planned"
    files += "" if needed_files is None else f", {needed_files} needed"
    return f"{table.table[-1]}: {table.predicate or 'no condition'}, {len(table.plan.joins)} joins, {files}"


def _count_considered(plan: Explanation) -> int:
    return plan.stages[0].files_in if plan.stages else plan.files


def _answer_query(con: duckdb.DuckDBPyConnection, text: str) -> tuple[Counter[str], int]:
    """Return the rows, and the number of files that DuckDB read."""
    rows = count_rows(con, text)
    profile = con.get_profiling_information()
    return rows, _count_files_read(json.loads(profile) if isinstance(profile, str) else profile)


def _count_files_read(node: dict[str, Any]) -> int:
    extra_info = node.get("extra_info") or {}
    return int(extra_info.get("Total Files Read", 0)) + sum(map(_count_files_read, node.get("children", ())))


def main() -> None:
    parser = build_parser("bench.corpus.run", __doc__, {"corpus": run})
    parser.add_argument("--share", type=float, default=SAMPLE_SHARE, help="share of the rows and files to write")
    arguments = parser.parse_args()
    benches = {"corpus": run}
    run_benches(
        benches,
        choose_benchmarks(parser, arguments, benches),
        quick=arguments.quick,
        save=arguments.share == SAMPLE_SHARE,
        options=lambda _: {"share": arguments.share},
    )


if __name__ == "__main__":
    main()
