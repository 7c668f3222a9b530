"""How many more files than necessary do SSB's queries read, and how much faster is Trino with the proxy?

The same Trino answers each query directly and through the proxy, alternately in one run. The bound is the number of
files with a row for which the whole WHERE clause is true, including joins. DuckDB finds this number in the data files.
Each answer is compared with DuckDB's.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from math import exp, log
from pathlib import Path

from bench.report import OURS, AnswersDiffer, Report, Row
from bench.ssb.bounds import count_files_with_rows, list_data_paths
from bench.ssb.queries import QUERIES, Oracle
from bench.ssb.spark import FACT
from bench.trino.asking import TrinoAnswer, TrinoConnection
from bench.trino.lake import LAYOUTS, FactLayout, open_lake
from seamark.connector.client.client import SeamarkClient
from tests.services.trino import trino_server
from tests.services.trino_proxy import run_trino_proxy

DIRECT, BOUND = "direct", "bound"
OVER_BOUND_MAX = 1.05
WALL_BETTER_MIN = 5.0
SLOWER_MAX, SLOWER_MS_MAX = 1.05, 20.0
CLUSTERED_LAYOUT = "hilbert"
LARGE = (5.0, 5000)
"""The scale and the number of files: 30 M facts. The files are as large as those of scale 1 in 1,000 files."""
LARGE_BUDGET_MS = 2000
QUICK = {"scale": 0.01, "files": 40, "rounds": 1}
WARM_ROUNDS = 2
"""The rounds that do not count. In its second run, a query still takes twice as long as later."""
DOUBTFUL_ROUNDS = 8
"""Additional rounds of queries that seem slower than tolerated, because Trino's times vary by more than that."""


@dataclass
class LayoutMeasurement:
    """The measurements of one query on one layout, in each round with and without the proxy."""

    layout: FactLayout
    query: str
    total: int
    """The number of files of the facts."""
    bound: int
    answers: dict[str, list[TrinoAnswer]] = field(default_factory=lambda: {OURS: [], DIRECT: []})

    def compute_median(self, client_name: str, attribute: str) -> float:
        return statistics.median(getattr(item, attribute) for item in self.answers[client_name])

    @property
    def files(self) -> int:
        """The largest number of files that Trino received through the proxy in any round."""
        return max(item.files for item in self.answers[OURS])

    @property
    def over_bound(self) -> float:
        return max(1, self.files) / max(1, self.bound)

    @property
    def file_reduction(self) -> float:
        """The splits that Trino reads without the proxy, divided by the splits that it reads with the proxy.

        The splits show how many files Trino opens. Without the proxy, Trino also leaves out some files while joins run.
        """
        return max(1.0, self.compute_median(DIRECT, "splits")) / max(1.0, self.compute_median(OURS, "splits"))

    @property
    def byte_reduction(self) -> float:
        """The bytes that Trino reads without the proxy, divided by the bytes that it reads with the proxy."""
        return max(1.0, self.compute_median(DIRECT, "kilobytes")) / max(1.0, self.compute_median(OURS, "kilobytes"))

    @property
    def faster(self) -> float:
        return self.compute_median(DIRECT, "wall_ms") / self.compute_median(OURS, "wall_ms")

    @property
    def slower_ms(self) -> float:
        """The milliseconds by which the query is slower than tolerated."""
        direct_ms = self.compute_median(DIRECT, "wall_ms")
        return max(0.0, self.compute_median(OURS, "wall_ms") - max(direct_ms * SLOWER_MAX, direct_ms + SLOWER_MS_MAX))


async def run(folder: Path, *, quick: bool = False, scale: float = 1.0, files: int = 1000, rounds: int = 3) -> Report:
    if quick:
        scale, files, rounds = QUICK["scale"], int(QUICK["files"]), int(QUICK["rounds"])
    return _run_queries("trino_ssb", folder, LAYOUTS, scale, files, rounds)


async def run_large(folder: Path, *, quick: bool = False, rounds: int = 5) -> Report:
    """Run only the clustered layout, at a large scale, where the fixed cost of a query matters less."""
    scale, files = LARGE
    if quick:
        scale, files, rounds = QUICK["scale"], int(QUICK["files"]), int(QUICK["rounds"])
    layouts = [item for item in LAYOUTS if item.name == CLUSTERED_LAYOUT]
    report = _run_queries("trino_ssb_large", folder, layouts, scale, files, rounds, "--budget-ms", f"{LARGE_BUDGET_MS}")
    report.notes.append(
        f"The proxy may take {LARGE_BUDGET_MS} ms for the plans of a statement, not 250. With 30 M rows, the first "
        "plan of a query with joins takes longer than 250 ms."
    )
    return report


def _run_queries(
    bench: str, folder: Path, layouts: Sequence[FactLayout], scale: float, files: int, rounds: int, *flags: str
) -> Report:
    """Run all queries on each layout, with and without the proxy, and return the report.

    After the rounds, queries that were slower with the proxy than tolerated are measured again, because Trino's times
    vary.

    Args:
        flags: Options of the proxy.
    """
    with ExitStack() as stack:
        server, data = stack.enter_context(open_lake(folder, scale, files, layouts))
        oracle = stack.enter_context(closing(Oracle(data)))
        client = stack.enter_context(closing(SeamarkClient(server.base_url)))
        trino = stack.enter_context(trino_server(folder / "trino", uri=server.base_url, jvm=()))
        arguments = ("--trino", trino.base_url, *flags)
        proxy = stack.enter_context(run_trino_proxy(folder / "proxy", *arguments, seamark=server.base_url))
        clients = {
            name: stack.enter_context(closing(TrinoConnection(url, trino.base_url)))
            for name, url in ((DIRECT, trino.base_url), (OURS, proxy.url))
        }
        file_counts_by_layout = {
            layout.name: count_needed_files(client, layout, data) for layout in layouts if layout.base_layout is None
        }
        cases = []
        for layout in (layout for layout in layouts if layout.base_layout is None):
            similar_layouts = [item for item in layouts if layout.name in (item.name, item.base_layout)]
            for number in range(-WARM_ROUNDS, rounds):
                for query, sql in QUERIES.items():
                    if number == -WARM_ROUNDS:
                        total, needed_files = file_counts_by_layout[layout.name]
                        cases += [
                            LayoutMeasurement(item, query, total, needed_files[query]) for item in similar_layouts
                        ]
                    query_cases = [case for case in cases if case.query == query and case.layout in similar_layouts]
                    _run_alternately(
                        query_cases, sql, clients, oracle, is_reversed=number % 2 == 1, is_counted=number >= 0
                    )
            slower_cases = [case for case in cases if case.layout in similar_layouts and case.slower_ms > 0]
            for number in range(0 if rounds == 1 else DOUBTFUL_ROUNDS):
                for query in dict.fromkeys(item.query for item in slower_cases):
                    query_cases = [item for item in slower_cases if item.query == query]
                    _run_alternately(
                        query_cases, QUERIES[query], clients, oracle, is_reversed=number % 2 == 1, is_counted=True
                    )
    return _build_report(bench, layouts, cases, scale, rounds)


def count_needed_files(client: SeamarkClient, layout: FactLayout, data: Path) -> tuple[int, dict[str, int]]:
    """Return the number of all files of the fact table, and by query the number of files with a needed row."""
    paths = list_data_paths(client, (layout.name, FACT))
    return len(paths), count_files_with_rows(paths, data)


def _run_alternately(
    cases: Sequence[LayoutMeasurement],
    sql: str,
    clients: Mapping[str, TrinoConnection],
    oracle: Oracle,
    *,
    is_reversed: bool,
    is_counted: bool,
) -> None:
    """Run a query once without the proxy, and once through the proxy for each case.

    The cases have the same files and differ only in their indexes, which Trino alone does not use. Therefore one answer
    without the proxy counts for all cases.

    Args:
        is_reversed: Whether to run in reverse order. The order alternates, so that neither side always runs first.
        is_counted: Whether to record the answers. Those of warm-up rounds are not recorded.
    """
    order = [(DIRECT, cases[0]), *((OURS, case) for case in cases)]
    for client_name, case in reversed(order) if is_reversed else order:
        answer = clients[client_name].ask(sql, case.layout.name)
        if difference := oracle.describe_difference(sql, answer.rows):
            raise AnswersDiffer(f"{case.query} on {case.layout.label}, {client_name}: {difference}")
        for item in (case,) if client_name == OURS else cases:
            if is_counted:
                item.answers[client_name].append(answer)


# The report


def _build_report(
    bench: str, layouts: Sequence[FactLayout], cases: Sequence[LayoutMeasurement], scale: float, rounds: int
) -> Report:
    report = Report(
        bench,
        "How near do SSB's queries come to reading only the files that they need, and what is it worth to Trino?",
        peer="the same Trino without the proxy; for files, the number of files with a needed row",
    )
    by_layout = {layout.name: [case for case in cases if case.layout == layout] for layout in layouts}
    for layout in layouts:
        report.rows += _summarize(layout, by_layout[layout.name])
    for case in cases:
        report.rows += _list_rows(case)
    total = max(case.total for case in cases)
    report.notes += [
        f"SSB at scale {scale:g}; lineorder in up to {total:,} files; medians of {rounds} rounds, direct and by the "
        f"proxy in turns, after {WARM_ROUNDS} of each that are not counted. All answers equal DuckDB's.",
        "`files` is the number of files of the fact table that Trino received. The bound is the number of files with a "
        "row that the answer needs after all joins. `Fewer files` compares the splits that Trino read, because Trino "
        "alone also leaves out files while a join runs.",
        "Wall time is the client's, planning is Trino's own and lies within it.",
        f"Slower: wall time beyond what is allowed, {SLOWER_MAX - 1:.0%} or {SLOWER_MS_MAX:g} ms, whichever is more. "
        f"Queries that were slower after {rounds} rounds ran {DOUBTFUL_ROUNDS} times more, and all rounds count.",
        *_list_unchanged_queries(cases),
    ]
    return report


def _summarize(layout: FactLayout, cases: Sequence[LayoutMeasurement]) -> list[Row]:
    worst = max(cases, key=lambda case: case.over_bound)
    slowest = max(cases, key=lambda case: case.slower_ms)
    bound_goal = OVER_BOUND_MAX if layout.index == "bitmap" else None
    wall_goal = WALL_BETTER_MIN if layout.name == CLUSTERED_LAYOUT else None
    return [
        Row(layout.label, "files over the bound, worst", "×", {OURS: worst.over_bound}, goal=bound_goal),
        Row(
            layout.label,
            "files over the bound, mean",
            "×",
            {OURS: compute_geometric_mean([case.over_bound for case in cases])},
        ),
        Row(
            layout.label,
            "fewer files, mean",
            "×",
            {OURS: compute_geometric_mean([case.file_reduction for case in cases])},
            lower_is_better=False,
        ),
        Row(
            layout.label,
            "less read, mean",
            "×",
            {OURS: compute_geometric_mean([case.byte_reduction for case in cases])},
            lower_is_better=False,
        ),
        Row(
            layout.label,
            "faster, mean",
            "×",
            {OURS: compute_geometric_mean([case.faster for case in cases])},
            lower_is_better=False,
            goal=wall_goal,
        ),
        Row(layout.label, f"slower, worst ({slowest.query})", "ms", {OURS: slowest.slower_ms}, goal=0.0),
    ]


def compute_geometric_mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean."""
    return exp(statistics.fmean(log(ratio) for ratio in ratios))


def _list_rows(case: LayoutMeasurement) -> list[Row]:
    name = f"{case.layout.label}, {case.query}"
    rows = [Row(name, "files", "files", {OURS: float(case.files), BOUND: float(case.bound)}, peer=BOUND)]
    for measure, unit, attribute in (
        ("wall", "ms", "wall_ms"),
        ("planning", "ms", "planning_ms"),
        ("splits", "splits", "splits"),
        ("read", "kB", "kilobytes"),
    ):
        rows.append(
            Row(
                name,
                measure,
                unit,
                {contender: case.compute_median(contender, attribute) for contender in (OURS, DIRECT)},
                peer=DIRECT,
            )
        )
    return rows


def _list_unchanged_queries(cases: Sequence[LayoutMeasurement]) -> list[str]:
    """Return the queries that Trino received unchanged, each with the reason that the proxy gave."""
    queries_by_reason: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        reason = next(
            (item.proxy_plan for item in case.answers[OURS] if not item.proxy_plan.startswith("rewritten")), None
        )
        if reason is not None:
            queries_by_reason.setdefault((case.layout.label, reason), []).append(case.query)
    return [
        f"Sent unchanged, {layout}: {', '.join(query_names)} ({reason})"
        for (layout, reason), query_names in queries_by_reason.items()
    ]
