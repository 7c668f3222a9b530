"""The result as one self-contained HTML file, with the figures and with pictures of both layouts.

A picture shows one attribute. Each data file is a bar from its smallest to its largest value, by rank among all
values. The files are sorted by their smallest value. A plan can leave out files with short bars.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from bench.demo.queries import CLUSTERED, CONFIGURATIONS, FILE_CONFIGURATIONS, ICEBERG, UNTOUCHED, Comparison
from bench.demo.screen import BOUND, LAYOUT_TITLES, MIB, format_sentence
from bench.ssb.bounds import open_facts

ATTRIBUTES = {
    "order date": ("date", "d_datekey", "lo_orderdate"),
    "customer's city": ("customer", "c_city", "lo_custkey = c_custkey"),
    "supplier's city": ("supplier", "s_city", "lo_suppkey = s_suppkey"),
    "part's brand": ("part", "p_brand1", "lo_partkey = p_partkey"),
}
"""The attributes by which the layout clusters: their table, their column, and the join of the facts with it."""
WIDTH, HEIGHT = 520, 120
_COLOURS = {ICEBERG: "#8a8f98", UNTOUCHED: "#3b82c4", CLUSTERED: "#12805c", BOUND: "#c77700"}
_STYLE = """
:root { color-scheme: light dark; --line: #8886; --text: #1b1f24; --back: #fff; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e8eb; --back: #16181c; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 1120px;
  margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(320px, 1fr)); gap: 1.5rem; }
figure { margin: 0 0 1rem; } svg { width: 100%; height: auto; border: 1px solid var(--line); }
svg text { fill: var(--text); font: 12px system-ui, sans-serif; }
"""

Bars = list[tuple[float, float]]


def read_ranges(paths: Sequence[str], data: Path) -> dict[str, Bars]:
    """Return the range of each file for each attribute, in ranks between 0 and 1, sorted by the smallest rank."""
    results = {}
    with closing(open_facts(paths, data)) as db:
        for name, (table, column, key_column) in ATTRIBUTES.items():
            ranks = f'(SELECT *, percent_rank() OVER (ORDER BY {column}) AS rank FROM "{table}")'
            join_condition = key_column if "=" in key_column else f"{key_column} = {column}"
            rows = db.execute(
                f"SELECT min(rank), max(rank) FROM lineorder JOIN {ranks} ON {join_condition}"
                " GROUP BY filename ORDER BY 1, 2"
            ).fetchall()
            results[name] = [(float(low), float(high)) for low, high in rows]
    return results


def format_report(
    comparisons: Sequence[Comparison],
    written_ranges: Mapping[str, Bars],
    clustered_ranges: Mapping[str, Bars],
    scale: float,
) -> str:
    """Return the result of the demo as the text of an HTML page.

    Args:
        written_ranges, clustered_ranges: The ranges (`read_ranges`) of the facts' files as written, and in Seamark's
            layout.
    """
    pictures = "".join(
        '<div class="pair">'
        + _format_layout(name, "as written", written_ranges[name], _COLOURS[ICEBERG])
        + _format_layout(name, "in Seamark's layout", clustered_ranges[name], _COLOURS[CLUSTERED])
        + "</div>"
        for name in ATTRIBUTES
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Seamark demo</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style><body><h1>Star Schema Benchmark, scale {scale:g}</h1>"
        f"{''.join(map(_format_engine, comparisons))}"
        "<h2>Why: what each file holds</h2><p>Each bar is a data file, from its smallest to its largest value. A query "
        "for one value opens only files whose bars cross that value. As written, the files are ordered by date "
        "alone.</p>"
        f"{pictures}</body></html>\n"
    )


def _format_engine(comparison: Comparison) -> str:
    return (
        f"<h2>Files opened in {comparison.engine}</h2><p>{html.escape(format_sentence(comparison))}</p>"
        f"{_format_bars(comparison)}{_format_table(comparison)}"
    )


def _format_bars(comparison: Comparison) -> str:
    names = (*FILE_CONFIGURATIONS, BOUND)
    # All sizes are in pixels of the picture.
    row, left_margin, bar_width_max, gap_below_query = 16, 60, 900, 12
    picture_width = 1040  # leaves room for the number to the right of the longest bar
    text_gap, text_rise = 6, 5  # from the bar to its number, and from the lower edge of the row to the number
    height = len(comparison.queries) * (row * len(names) + gap_below_query)
    maximum = max(
        query.count_files(configuration) for query in comparison.queries for configuration in FILE_CONFIGURATIONS
    )
    parts: list[str] = []
    y = 4.0
    for query in comparison.queries:
        parts.append(f'<text x="0" y="{y + row * 2}">{query.name}</text>')
        for name in names:
            count = query.needed_files if name == BOUND else query.count_files(name)
            width = max(1.0, count / max(1, maximum) * bar_width_max)
            parts.append(
                f'<rect x="{left_margin}" y="{y}" width="{width:.1f}" height="{row - 3}" fill="{_COLOURS[name]}"/>'
            )
            parts.append(f'<text x="{left_margin + width + text_gap:.1f}" y="{y + row - text_rise}">{count:,}</text>')
            y += row
        y += gap_below_query
    legend = " · ".join(
        f'<span style="color:{_COLOURS[name]}">■</span> {html.escape(LAYOUT_TITLES.get(name, name))}' for name in names
    )
    label = "Files opened by each query"
    return f"<p>{legend}</p>" + _format_svg(picture_width, height, label, parts)


def _format_table(comparison: Comparison) -> str:
    columns_by_unit = {"files": FILE_CONFIGURATIONS, "MiB": FILE_CONFIGURATIONS, "s": CONFIGURATIONS}
    heads = [
        f"{unit}, {html.escape(LAYOUT_TITLES[column])}" for unit in columns_by_unit for column in columns_by_unit[unit]
    ]
    heads.insert(len(FILE_CONFIGURATIONS), "bound")
    rows = "".join(
        f"<tr><td>{query.name}</td>"
        + "".join(f"<td>{query.count_files(column):,}</td>" for column in FILE_CONFIGURATIONS)
        + f"<td>{query.needed_files:,}</td>"
        + "".join(f"<td>{query.size_bytes(column) / MIB:,.1f}</td>" for column in FILE_CONFIGURATIONS)
        + "".join(f"<td>{query.compute_median_s(column):.2f}</td>" for column in CONFIGURATIONS)
        + "</tr>"
        for query in comparison.queries
    )
    return f"<table><tr><th>query</th>{''.join(f'<th>{head}</th>' for head in heads)}</tr>{rows}</table>"


def _format_layout(attribute: str, layout: str, bars: Sequence[tuple[float, float]], colour: str) -> str:
    step = WIDTH / max(1, len(bars))
    parts = [
        f'<rect x="{index * step:.2f}" y="{(1 - high) * HEIGHT:.1f}" width="{max(0.6, step * 0.85):.2f}" '
        f'height="{max(1.0, (high - low) * HEIGHT):.1f}" fill="{colour}"/>'
        for index, (low, high) in enumerate(bars)
    ]
    width = sum(high - low for low, high in bars) / max(1, len(bars))
    caption = f"{attribute}, {layout}: a file covers {width:.0%} of the values on average"
    return (
        f"<figure>{_format_svg(WIDTH, HEIGHT, caption, parts)}<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


def _format_svg(width: int, height: int, label: str, parts: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )
