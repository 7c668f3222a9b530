"""The result in one terminal screen: a table, bars and one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.demo.queries import (
    CLUSTERED,
    CONFIGURATIONS,
    CUBED,
    FILE_CONFIGURATIONS,
    ICEBERG,
    UNTOUCHED,
    Comparison,
    DemoQuery,
)
from seamark.commands.terminal import print_bars

MIB = 1 << 20
LAYOUT_TITLES = {
    ICEBERG: "Iceberg alone",
    UNTOUCHED: "with Seamark, files as written",
    CLUSTERED: "with Seamark's layout",
    CUBED: "with cubes",
}
HEADS = {ICEBERG: "alone", UNTOUCHED: "plans", CLUSTERED: "layout", CUBED: "cube"}
"""The heads of the columns, short enough for three groups of figures in 80 characters."""
BOUND = "files with a row of the answer"
_LINE_MAX = 1000


def print_result(comparisons: Sequence[Comparison], scale: float, console: Console) -> None:
    """Print the result of the first engine for each query, and the totals of the other engines."""
    first, *other_queries = comparisons
    console.print(f"\nStar Schema Benchmark, scale {scale:g}, in {first.engine}: files, MiB and seconds of each query.")
    for column in CONFIGURATIONS:
        console.print(f"  {HEADS[column]:<7}  {LAYOUT_TITLES[column]}", highlight=False)
    console.print(f"  bound    {BOUND}", highlight=False)
    table = build_result_table(first)
    # Figures of a large scale can be wider than the terminal. The terminal wraps the lines; a cut figure would mislead.
    table.width = console.measure(table, options=console.options.update(max_width=_LINE_MAX)).maximum
    console.print(table, soft_wrap=True)
    _show_bars(first, console)
    console.print(f"\n{format_sentence(first)}", highlight=False)
    for comparison in other_queries:
        console.print(f"\nThe same 13 queries in {comparison.engine}: files, MiB and seconds of all")
        console.print(build_totals_table(comparison))
        console.print(format_sentence(comparison), highlight=False)


def build_totals_table(comparison: Comparison) -> Table:
    """Return a table with the totals of all queries, one row for each way to run them."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(comparison.engine, no_wrap=True)
    for head in ("files", "MiB", "s"):
        table.add_column(head, justify="right", no_wrap=True)
    total = comparison.total
    for column in CONFIGURATIONS:
        has_files = column in FILE_CONFIGURATIONS
        table.add_row(
            LAYOUT_TITLES[column],
            f"{total(lambda query, column=column: query.count_files(column)):,.0f}" if has_files else "",
            f"{total(lambda query, column=column: query.size_bytes(column)) / MIB:,.0f}" if has_files else "",
            f"{total(lambda query, column=column: query.compute_median_s(column)):.1f}",
        )
    return table


def build_result_table(comparison: Comparison) -> Table:
    """Return a row for each query: files opened and megabytes in three columns, and seconds in four.

    The table fits into 80 characters.
    """
    table = Table(show_footer=True, box=SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    total = comparison.total
    table.add_column("", "all", no_wrap=True)

    def add(unit: str, name: str, text: str) -> None:
        first = "  " if name == HEADS[ICEBERG] else ""  # groups of figures are further apart
        table.add_column(f"{unit}\n{first}{name}", text, justify="right", no_wrap=True)

    for column in FILE_CONFIGURATIONS:
        add("files", HEADS[column], f"{total(lambda query, column=column: query.count_files(column)):,.0f}")
    add("files", "bound", f"{total(lambda query: query.needed_files):,.0f}")
    for column in FILE_CONFIGURATIONS:
        add("MiB", HEADS[column], f"{total(lambda query, column=column: query.size_bytes(column)) / MIB:,.0f}")
    for column in CONFIGURATIONS:
        add("s", HEADS[column], f"{total(lambda query, column=column: query.compute_median_s(column)):.1f}")
    for query in comparison.queries:
        table.add_row(*_format_cells(query))
    return table


def _format_cells(query: DemoQuery) -> list[str]:
    return [
        query.name,
        *(f"{query.count_files(column):,}" for column in FILE_CONFIGURATIONS),
        f"{query.needed_files:,}",
        *(f"{query.size_bytes(column) / MIB:,.0f}" for column in FILE_CONFIGURATIONS),
        *(f"{query.compute_median_s(column):.2f}" for column in CONFIGURATIONS),
    ]


def _show_bars(comparison: Comparison, console: Console) -> None:
    counts = {
        LAYOUT_TITLES[configuration]: comparison.total(
            lambda query, configuration=configuration: query.count_files(configuration)
        )
        for configuration in FILE_CONFIGURATIONS
    }
    counts[BOUND] = comparison.total(lambda query: query.needed_files)
    console.print(f"\nFiles opened by the {len(comparison.queries)} queries\n")
    print_bars([(name, count, f"{count:>7,.0f}") for name, count in counts.items()], console)


def format_sentence(comparison: Comparison) -> str:
    """Return sentences that state the result of the demo in figures."""
    from_cubes = len(comparison.list_queries_from_cubes())
    cubes = f": {comparison.compare_seconds_from_cubes():.1f}× sooner" if from_cubes else ""
    return (
        f"All configurations return the same answers from the same data in {comparison.engine}. Seamark opens "
        f"{comparison.compare_files(UNTOUCHED):.1f}× fewer files of the table as PyIceberg wrote it. In Seamark's "
        f"layout, it opens {comparison.compare_files(CLUSTERED):.1f}× fewer files and answers "
        f"{comparison.compare_seconds(CLUSTERED):.1f}× sooner (geometric means). There it opens at most "
        f"{comparison.find_worst_ratio():.2f}× the files that have a row of the answer. "
        f"Cubes answer {from_cubes} of {len(comparison.queries)} queries without reading the facts{cubes}. "
        "DuckDB confirmed every answer."
    )
