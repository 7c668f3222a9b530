"""Generate the figures in README.md and docs/reference/benchmarks.md from `bench/results/`; a test compares them.

`python -m bench.readme` writes the section between the two marker lines of each page. README.md shows `HEADLINES`.
"""

from __future__ import annotations

from pathlib import Path

from bench.picture import PICTURE, draw_ratio_bars
from bench.report import BUSY, OURS, RESULTS, Report, format_cells

README = Path(__file__).resolve().parents[1] / "README.md"
PAGE = README.parent / "docs" / "reference" / "benchmarks.md"
BEGIN = "<!-- bench: begin (filled by python -m bench.readme; do not edit) -->"
END = "<!-- bench: end -->"

CLAIMS: dict[str, tuple[tuple[str, str], ...]] = {
    "load_table": (("snapshots=refs", "p50"), ("snapshots=all", "p50"), ("commit of one property", "p50")),
    "small_request": (
        ("loadTable, 8 clients", "server CPU"),
        ("loadTable, 8 clients", "requests"),
        ("loadTable, 1 client", "p50"),
        ("HEAD table, 1 client", "p50"),
    ),
    "commits": (
        ("property, 1 table, 1 client", "commits"),
        ("append, 1 table, 8 clients", "commits"),
        ("append, 100 tables, 8 clients", "commits"),
    ),
    "mix": (("100% reads, 8 clients", "requests"), ("50% reads, 8 clients", "requests")),
    "memory": (("10,000 tables created", "resident"), ("each loaded once", "resident")),
    "duckdb_point": (
        ("by record index", "a statement"),
        ("by bloom index", "a statement"),
        ("by bitmap index", "a statement"),
        ("by min and max, in order", "a statement"),
    ),
    "sql_point": (
        ("by record index", "a statement"),
        ("by bloom index", "a statement"),
        ("by bitmap index", "a statement"),
        ("by min and max, in order", "a statement"),
    ),
}
"""The rows of each benchmark that the documentation shows: (case, measure)."""

HEADLINES: dict[tuple[str, str, str], tuple[str, str]] = {
    ("planning_warm", "1,000,000 files, narrow range", "plan"): (
        "plan a filter over 1,000,000 files",
        "Iceberg's Java planner",
    ),
    ("planning_http", "the same plan, 1 connection, 1 worker", "p50"): (
        "answer a cached plan over HTTP",
        "an HTTP server that returns the same bytes",
    ),
    ("index_bloom", "1 key × 100,000 files, warm", "probe"): (
        "find the files of a key in 100,000 files",
        "the best Parquet reader",
    ),
    ("index_record", "one key", "lookup"): ("find the row of a key", "the best Parquet reader"),
    ("load_table", "snapshots=refs", "p50"): ("load a table with 10,000 snapshots", "Iceberg's REST fixture"),
    ("commits", "append, 100 tables, 8 clients", "commits"): (
        "commit appends to 100 tables by 8 clients",
        "Iceberg's REST fixture",
    ),
    ("writing_upserts", "10,000,000 rows, merge-on-read", "PySpark, record index; merge"): (
        "upsert into 10,000,000 rows from Spark",
        "Iceberg's MERGE INTO",
    ),
    ("trino_point", "by record index", "a statement"): ("look up a key in Trino", "Trino without the proxy"),
    ("sql_point", "by record index", "a statement"): ("look up a key by `seamark sql`", "DuckDB without Seamark"),
    ("trino_ssb_large", "Hilbert on date, cities, brand, bitmap", "faster, mean"): (
        "Star Schema Benchmark, scale 5, in Trino",
        "Trino without the proxy",
    ),
}
"""(bench, case, measure) → (operation, peer): the rows that the README shows."""

CAPTION = (
    "The ratio says how many times as fast Seamark is. Below 1×, Seamark is slower. The last row is the geometric mean "
    "of the 13 queries, on 30 million rows."
)

PLANNING_CLAIMS: dict[str, tuple[tuple[str, str], ...]] = {
    "planning_warm": tuple(
        (f"{files} files, {case}", "plan")
        for files in ("100,000", "1,000,000")
        for case in ("narrow range", "ordered column", "string equality", "three columns")
    ),
    "planning_cold": (
        ("100,000 files, first plan ever", "plan"),
        ("100,000 files, first after a restart", "plan"),
        ("1,000,000 files, first plan ever", "plan"),
        ("1,000,000 files, first after a restart", "plan"),
    ),
    "planning_memory": (("1,000,000 files", "blocks and views"),),
    "planning_http": (
        ("the same plan, 1 connection, 1 worker", "server CPU"),
        ("the same plan, 1 connection, 1 worker", "p50"),
        ("the same plan, 16 connections, 1 worker", "requests"),
        ("a new filter, 1 connection, 1 worker", "server CPU"),
    ),
    "planning_lookup": (("statistics", "before encoding"), ("statistics", "Arrow over HTTP, p50")),
}
INDEX_CLAIMS: dict[str, tuple[tuple[str, str], ...]] = {
    "index_bloom": (
        ("1 key × 100,000 files, warm", "probe"),
        ("1 key × 100,000 files, cold", "probe"),
        ("key of no file", "false positives"),
    ),
    "index_bitmap": (
        ("cardinality 11, two-column AND", "row positions"),
        ("cardinality 1,000,000, two-column AND", "row positions"),
        ("cardinality 1,000, build", "any order, one core"),
    ),
    "index_record": (("one key", "lookup"), ("100,000 keys", "lookup"), ("size", "an entry")),
    "index_build": (
        ("bitmap of discount, 11 values", "built, one core"),
        ("bitmap of discount, 11 values", "index a byte of all data"),
        ("record of order_key", "built, one core"),
        ("record of order_key", "index a byte of all data"),
    ),
}
WRITING_CLAIMS: dict[str, tuple[tuple[str, str], ...]] = {
    "writing_upserts": (
        ("1,000,000 rows, merge-on-read", "PySpark, record index; merge"),
        ("10,000,000 rows, merge-on-read", "PySpark, record index; merge"),
        ("10,000,000 rows, merge-on-read", "PySpark, record index; hudi"),
        ("10,000,000 rows, merge-on-read", "PySpark, bucket, equality deletes; merge"),
        ("10,000,000 rows, merge-on-read", "PySpark, bucket, equality deletes; hudi"),
        ("10,000,000 rows, merge-on-read", "Python, bucket, equality deletes; merge"),
        ("10,000,000 rows, merge-on-read", "Python, record index; merge"),
        ("10,000,000 rows, copy-on-write", "PySpark, bucket; merge"),
        ("10,000,000 rows, copy-on-write", "PySpark, bucket; hudi"),
        ("50,000,000 rows beside 1,000,000", "PySpark, record index"),
        ("50,000,000 rows beside 1,000,000", "PySpark, bucket, equality deletes"),
    ),
    "writing_reader": (
        ("one row of 100,000", "time"),
        ("one row of 100,000", "read"),
        ("30 M rows: one row of 100,000", "time"),
        ("30 M rows: one row of 100,000", "read"),
        ("all rows", "time"),
    ),
    "writing_contention": (
        ("8 writers × 50 commits", "upserts, commits"),
        ("8 writers × 50 commits", "upserts, failed"),
        ("8 writers × 50 commits", "PyIceberg's appends, rebased, commits"),
        ("8 writers × 50 commits", "PyIceberg's appends, rebased, failed"),
    ),
    "writing_buckets": (
        ("rows of one key", "time"),
        ("rows of one key", "files read"),
        ("join of two bucketed tables", "time"),
        ("grouping by the key", "time"),
    ),
    "writing_services": (
        ("300 appends by Spark", "point query, p50"),
        ("300 appends by Spark", "point query, p99"),
        ("300 appends by Spark", "append, p99"),
        ("300 appends by Spark", "failed operations of the writer and the reader"),
        ("300 appends by Spark", "data files in the end"),
    ),
    "writing_feed": (
        ("most in the second half of the commits", "data files"),
        ("most in the second half of the commits", "metadata file"),
        ("in the end", "depth"),
        ("in the end", "bytes opened, range"),
        ("last fifth of the commits", "plan of a range, p50"),
        ("last fifth compared with the second fifth", "plan of a range, p10"),
        ("500 commits of 2,000 rows", "bytes that services wrote, for each appended byte"),
    ),
    "writing_layouts": tuple(
        (case, f"bytes opened, beside {peer}")
        for case in (
            "uniform, 2 columns",
            "skewed, 3 columns",
            "strings with a long common prefix, 2 columns",
            "correlated, 4 columns",
        )
        for peer in ("Iceberg, sort", "Iceberg, z-order")
    ),
}
_FEWEST = "read the fewest files possible"
CORPUS_CLAIMS: dict[str, tuple[tuple[str, str], ...]] = {
    "corpus": tuple(
        (f"{schema} queries", measure)
        for schema in ("all: 119", "tpch: 22", "ssb: 13", "retail: 84")
        for measure in ("read fewer than all files", "read fewer files than DuckDB alone", "files read", _FEWEST)
    )
    + tuple(
        ("tpcds: 99 queries", measure)
        for measure in ("read fewer than all files", "read fewer files than DuckDB alone", "files read")
    )
}
TRINO_CLAIMS: dict[str, tuple[tuple[str, str], ...]] = {
    "trino_point": (
        ("by record index", "a statement"),
        ("by bloom index", "a statement"),
        ("by bitmap index", "a statement"),
        ("by record index", "a plan table, new, p50"),
    ),
    "trino_overhead": (
        ("SELECT 1", "p50"),
        ("a table, no condition", "p50"),
        ("a condition that no index knows", "p50"),
        ("a condition that all files hold", "p50"),
        ("1,000 clients at once", "failed"),
        ("1,024 MB in 1 page", "adapter's memory, more at the peak"),
    ),
    "trino_ssb": tuple(
        (layout, measure)
        for layout in (
            "as written, bitmap",
            "by date, bitmap",
            "z-order on date, discount, quantity, bitmap",
            "Hilbert on date, cities, brand, bitmap",
        )
        for measure in ("files over the bound, mean", "fewer files, mean", "faster, mean")
    ),
    "trino_ssb_large": tuple(
        ("Hilbert on date, cities, brand, bitmap", measure)
        for measure in ("files over the bound, worst", "fewer files, mean", "less read, mean", "faster, mean")
    ),
}
STREAM_CLAIMS: dict[str, tuple[tuple[str, str], ...]] = {
    "streams_appends": (
        ("1 rows of 100 B, 1 writers", "p99"),
        ("10 rows of 100 B, 32 writers", "acknowledged"),
        ("1,000 rows of 1,000 B, 32 writers", "acknowledged bytes"),
    ),
    "streams_ducklake": (
        ("one writer waits for each answer", "acknowledged"),
        ("32 writers wait for each answer", "acknowledged"),
        ("one writer with seamark.stream_writer", "acknowledged"),
    ),
    "streams_visible": (("10,000 rows/s", "visible, p50"), ("10,000 rows/s", "visible, p99")),
    "streams_spark": (
        ("10,000 rows/s, read by Spark", "visible, p99"),
        ("10,000 rows/s, read by PyIceberg", "visible, p50"),
        ("10,000 rows/s, read by PyIceberg", "visible, p99"),
        ("10,000 rows/s", "data files"),
        ("10,000 rows/s", "CPU for 1,000,000 rows"),
    ),
    "streams_topics": (
        ("20,000 messages of 1 rows, JSON", "appended"),
        ("2,000 messages of 100 rows, Arrow", "appended"),
    ),
    "streams_readers": (
        ("1 readers at full speed, log in files", "acknowledged"),
        ("1 readers at full speed, log in files", "p99"),
    ),
}


def format_headlines(folder: Path = RESULTS) -> str:
    """Return the README's table, without benchmarks that have no results."""
    lines = ["| operation | Seamark | compared with | ratio |", "|---|--:|---|--:|"]
    for name, operation, label, peer, ratio in _list_headline_rows(folder):
        lines.append(f"| [{operation}](bench/results/{name}.md) | {label} | {peer} | {ratio} |")
    lines += ["", CAPTION]
    return "\n".join(lines) + "\n"


def draw_picture(folder: Path = RESULTS) -> str:
    """Return the README's picture, an SVG with the ratios of its table."""
    return draw_ratio_bars([(operation, ratio) for _, operation, _, _, ratio in _list_headline_rows(folder)])


def _list_headline_rows(folder: Path) -> list[tuple[str, str, str, str, str]]:
    """Return (benchmark, operation, Seamark's figure, peer, ratio) for each row of the README's table."""
    results = []
    for (name, case, measure), (operation, peer) in HEADLINES.items():
        if not (folder / f"{name}.json").exists():
            continue
        rows = {(row.case, row.measure): row for row in Report.load(name, folder).rows}
        row = rows[case, measure]
        *_, ratio, seamark_cell, _ = format_cells(row, [OURS])
        if row.unit == "×":  # The value is a mean of ratios.
            ratio, seamark_cell = seamark_cell.replace(" ", ""), "–"
        results.append((name, operation, seamark_cell, peer, ratio))
    return results


def format_section(folder: Path = RESULTS) -> str:
    """Return the tables of the benchmarks page, without benchmarks that have no results."""
    actual = {name: Report.load(name, folder) for name in CLAIMS if (folder / f"{name}.json").exists()}
    plans = {name: Report.load(name, folder) for name in PLANNING_CLAIMS if (folder / f"{name}.json").exists()}
    indexes = {name: Report.load(name, folder) for name in INDEX_CLAIMS if (folder / f"{name}.json").exists()}
    writing_reports = {name: Report.load(name, folder) for name in WRITING_CLAIMS if (folder / f"{name}.json").exists()}
    reports_by_claim = {name: Report.load(name, folder) for name in TRINO_CLAIMS if (folder / f"{name}.json").exists()}
    reports = {name: Report.load(name, folder) for name in CORPUS_CLAIMS if (folder / f"{name}.json").exists()}
    stream_reports = {name: Report.load(name, folder) for name in STREAM_CLAIMS if (folder / f"{name}.json").exists()}
    if not any((actual, plans, indexes, writing_reports, reports_by_claim, reports, stream_reports)):
        return "No measurements yet: run `make bench`.\n"
    lines = []
    if actual:
        lines += _format_table(actual, CLAIMS)
        lines += [
            "Ratio: how many times better Seamark is than Iceberg's Java REST fixture, measured alternately in one run,"
            f" each server on one core, the load on another ({_format_machine(actual)}).",
            *_describe_load(actual),
            "The fixture keeps its SQLite in memory and syncs nothing; Seamark answers when a commit is durable.",
            "",
        ]
    if plans:
        lines += _format_table(plans, PLANNING_CLAIMS)
        lines += [
            "Ratio: how many times better Seamark is than the peer named first in each bench, in one run"
            f" ({_format_machine(plans)}). Java and PyIceberg decode the manifests for every plan; Seamark keeps them.",
            *_describe_load(plans),
            "",
        ]
    if indexes:
        lines += _format_table(indexes, INDEX_CLAIMS, servers=[OURS])
        lines += [
            "Ratio: how many times better Seamark is than the best reader of Parquet, or for builds than only reading"
            f" the same columns, in one run ({_format_machine(indexes)}). The peers' own figures are in the results.",
            *_describe_load(indexes),
            "",
        ]
    if writing_reports:
        lines += _format_table(writing_reports, WRITING_CLAIMS, servers=[OURS])
        lines += [
            "Ratio: how many times better Seamark is than the peer: Iceberg's MERGE INTO and rewrite_data_files,"
            " Hudi's bucket index, Iceberg's own reader, PyIceberg; or than without buckets; each in one run"
            f" ({_format_machine(writing_reports)}).",
            *_describe_load(writing_reports),
            "",
        ]
    if reports_by_claim:
        lines += _format_table(reports_by_claim, TRINO_CLAIMS, servers=[OURS])
        lines += [
            "Ratio: how many times better Trino is with the proxy than alone, measured alternately in one run"
            f" ({_format_machine(reports_by_claim)}). SSB: geometric means over its 13 queries; the bound is the number"
            " of files with a row of the answer.",
            *_describe_load(reports_by_claim),
            "",
        ]
    if reports:
        lines += _format_table(reports, CORPUS_CLAIMS)
        lines += [
            "Queries of TPC-H, the Star Schema Benchmark, a retail star and TPC-DS in DuckDB, with `seamark.duckdb` and"
            f" alone: the data files that DuckDB reads ({_format_machine(reports)}). The results give"
            f" the reason for each"
            " query without fewer files.",
            "",
        ]
    if stream_reports:
        lines += _format_table(stream_reports, STREAM_CLAIMS, servers=[OURS])
        lines += [
            "Ratio: how many times better Seamark is than the peer of each bench, in one run: Kafka with a sync for"
            " each record, DuckLake in DuckDB, a Structured Streaming job into Iceberg, and writers without readers"
            f" ({_format_machine(stream_reports)}).",
            *_describe_load(stream_reports),
            "",
        ]
    return "\n".join(lines)


def _format_table(
    reports: dict[str, Report], claims: dict[str, tuple[tuple[str, str], ...]], *, servers: list[str] | None = None
) -> list[str]:
    if servers is None:
        servers = list(dict.fromkeys(name for report in reports.values() for name in report.list_servers()))
    head = ["case", "measure", "ratio", *servers, "goal"]
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "--:|" * (len(head) - 2)]
    for name, report in reports.items():
        rows = {(row.case, row.measure): row for row in report.rows}
        for claim in claims[name]:
            case, *ratios = format_cells(rows[claim], servers)
            lines.append("| " + " | ".join([f"[{name}](../../bench/results/{name}.md): {case}", *ratios]) + " |")
    return [*lines, ""]


def _format_machine(reports: dict[str, Report]) -> str:
    facts = next(iter(reports.values())).machine
    return f"{facts['cpu']}, {facts['cores']} cores, {facts['when']}"


def _describe_load(reports: dict[str, Report]) -> list[str]:
    load_max = max(report.machine.get("load_before", 0) for report in reports.values())
    return (
        [f"Other work ran on the machine (load average up to {load_max}), so times are high."]
        if load_max > BUSY
        else []
    )


def fill_section(text: str, content: str) -> str:
    """Return `text` with `content` between its markers.

    Raises:
        ValueError: The markers are missing or in the wrong order.
    """
    begin, end = text.find(BEGIN), text.find(END)
    if begin < 0 or end < begin:
        raise ValueError(f"the page must contain the lines {BEGIN!r} and {END!r}, in this order")
    return text[: begin + len(BEGIN)] + "\n" + content + text[end:]


def update_pages() -> None:
    README.write_text(fill_section(README.read_text(), format_headlines()))
    PAGE.write_text(fill_section(PAGE.read_text(), format_section()))
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(draw_picture())


if __name__ == "__main__":
    update_pages()
