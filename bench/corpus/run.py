"""`python -m bench.corpus.run [--quick]`: how many of about 100 queries on star schemas read fewer files in DuckDB?

Each query is run by DuckDB's own Iceberg reader and by `seamark.duckdb`; both must give the same rows. Counted are the
data files of the tables that a query reads, for each reference, as `seamark explain --sql` shows them. DuckDB itself
also leaves files out by bounds, for conditions on a table's own columns; that is not counted, so that "before" is all
files. A query that gains nothing has its reason, as `explain` and `seamark.duckdb.rewritten` state it. No time is
measured. `--share` is the share of the rows and files.
"""

from __future__ import annotations

import re
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import duckdb

import seamark.duckdb
from bench.corpus.lakes import FACT_FILES, fill
from bench.report import OURS, Report, Row
from bench.run import names_of, parser_of, run_benches
from bench.ssb.queries import QUERIES
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import BadRequest
from seamark.connector.client.queries import explain_query
from tests.services.seamark import Seamark

PEER = "duckdb"
QUICK_SHARE = 0.03
_TPCH = Path(__file__).parents[2] / "tests" / "deploy" / "tpch.sql"
_RETAIL = Path(__file__).with_name("retail_queries.sql")
_NOT_A_COMMENT = re.compile(r"^(?!--).+$", re.MULTILINE)
_TITLE = re.compile(r"^-- (.+)$", re.MULTILINE)


class AnswersDiffer(Exception):
    """A plan gave other rows than DuckDB's own reader."""


@dataclass(frozen=True)
class Query:
    schema: str
    title: str
    text: str


def queries() -> list[Query]:
    parts = [one for one in _TPCH.read_text().split(";") if one.strip()]
    found = [Query("tpch", f"TPC-H {number}", _statement(one)) for number, one in enumerate(parts, 1)]
    found += [Query("ssb", f"SSB {name}", text) for name, text in QUERIES.items()]
    for part in _RETAIL.read_text().split(";"):
        if part.strip():
            found.append(Query("retail", f"retail: {_TITLE.findall(part)[-1].rstrip('.')}", _statement(part)))
    return found


def _statement(part: str) -> str:
    return "\n".join(_NOT_A_COMMENT.findall(part)).strip()


async def run(folder: Path, *, quick: bool = False, share: float = 1.0) -> Report:
    share = QUICK_SHARE if quick else share
    report = Report("corpus", "Which queries on star schemas read fewer files in DuckDB?", peer="all files")
    gains: Counter[str] = Counter()
    asked = queries()
    with Seamark(folder / "seamark", env={"SEAMARK_LOG_LEVEL": "warning"}) as server:
        fill(server, folder, share=share)
        with closing(seamark.duckdb.connect(server.base_url)) as con, closing(SeamarkClient(server.base_url)) as client:
            for query in asked:
                row, why = _measured(con, client, query)
                gains[query.schema] += not why
                report.rows.append(row)
                if why:
                    report.notes.append(f"{query.title}: {why}")
    report.notes.insert(
        0,
        f"{sum(gains.values())} of {len(asked)} queries read fewer files: "
        + ", ".join(f"{gains[one]} of {sum(query.schema == one for query in asked)} of {one}" for one in gains)
        + f". Facts lie in {max(8, round(FACT_FILES * share))} files. The reasons of the others:",
    )
    return report


def _measured(con: duckdb.DuckDBPyConnection, client: SeamarkClient, query: Query) -> tuple[Row, str]:
    """The files before and after, and the reason if they are the same."""
    con.execute(f"USE sea.{query.schema}")
    done = seamark.duckdb.rewritten(con, query.text)
    if done.statement is not None:
        found = [_rows(con, one) for one in (query.text, done.statement)]
        if found[0] != found[1]:
            raise AnswersDiffer(f"{query.title}: {query.text}\nbecame\n{done.statement}")
    try:
        tables = explain_query(client, query.text, dialect="duckdb", namespace=(query.schema,)).tables
    except BadRequest as error:
        row = Row(query.title, "not read", "files", {})
        return row, f"{error.message}; {done.summary}"
    before = sum(one.plan.stages[0].files_in if one.plan.stages else one.plan.files for one in tables)
    after = before if done.statement is None else sum(one.plan.files for one in tables)
    row = Row(query.title, "files", "files", {PEER: float(before), OURS: float(after)}, peer=PEER)
    told = ", ".join(
        f"{one.table[-1]}: {one.predicate or 'no condition'}, {len(one.plan.joins)} joins" for one in tables
    )
    return row, "" if after < before else f"{done.summary.removeprefix('unchanged; ')} ({told})"


def _rows(con: duckdb.DuckDBPyConnection, text: str) -> Counter[str]:
    """Sums of floats depend on the order of the rows in their last digits."""
    return Counter(
        repr(tuple(f"{one:.9g}" if isinstance(one, float) else one for one in row)) for row in con.sql(text).fetchall()
    )


def main() -> None:
    parser = parser_of("bench.corpus.run", __doc__, {"corpus": run})
    parser.add_argument("--share", type=float, default=1.0, help="of the rows and files")
    chosen = parser.parse_args()
    benches = {"corpus": run}
    run_benches(
        benches, names_of(parser, chosen, benches), quick=chosen.quick, options=lambda _: {"share": chosen.share}
    )


if __name__ == "__main__":
    main()
