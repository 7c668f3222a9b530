"""Tests that reports show what was measured: ratios, goals and failures; the README shows these figures and no
others.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench import readme
from bench.bodies import write_long_history
from bench.measure import Sample
from bench.mix import build_tree
from bench.picture import PICTURE, draw_ratio_bars
from bench.report import RESULTS, Report, Row, format_figure
from bench.run import BENCHES

MACHINE = {"cpu": "c", "cores": 2, "memory_gb": 1, "when": "now", "python": "3", "commit": "abc"}


def test_ratio_above_one_is_better_in_either_direction() -> None:
    assert Row("x", "p50", "ms", {"seamark": 2.0, "fixture": 10.0}).compute_ratio() == 5.0
    assert Row("x", "rate", "/s", {"seamark": 10.0, "fixture": 2.0}, lower_is_better=False).compute_ratio() == 5.0
    assert Row("x", "rate", "/s", {"seamark": 10.0}).compute_ratio() is None


def test_report_states_whether_a_goal_is_met_or_missed() -> None:
    report = Report("b", "Why?", machine=MACHINE)
    report.rows = [
        Row("fast", "p50", "ms", {"seamark": 4.0, "fixture": 8.0}, goal=5.0),
        Row("slow", "p50", "ms", {"seamark": 6.0, "fixture": 8.0}, goal=5.0),
    ]
    text = report.format_markdown()
    assert "| fast | p50 | 2.00× | 4.00 ms | 8.00 ms | 5.00 ms: met |" in text
    assert "| slow | p50 | 1.33× | 6.00 ms | 8.00 ms | 5.00 ms: missed |" in text


def test_report_names_failed_requests() -> None:
    report = Report("b", "Why?")
    good_sample = Sample([1.0], Counter({200: 1}), elapsed_s=1.0)
    bad_sample = Sample([1.0], Counter({200: 1, 500: 2}), ["GET: 500 b'oh'"], 2, 1.0)
    report.add_failures("load", {"seamark": [good_sample], "fixture": [good_sample, bad_sample]})
    assert report.notes == ["load: fixture failed 2 of 4 requests, such as GET: 500 b'oh'"]


def test_report_is_equal_after_saving_and_loading(tmp_path: Path) -> None:
    report = Report("b", "Why?", [Row("x", "p50", "ms", {"seamark": 1.0}, goal=2.0)], {"floor": "0"}, ["n"], MACHINE)
    report.save(tmp_path)
    assert Report.load("b", tmp_path) == report


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.01234, "0.0123"), (1.2345, "1.23"), (99.96, "100.0"), (12345.6, "12,300")]
)
def test_figures_have_three_significant_digits(value: float, text: str) -> None:
    assert format_figure(value) == text


def test_only_the_marked_section_of_the_readme_is_filled() -> None:
    text = f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n"
    assert readme.fill_section(text, "new\n") == f"before\n{readme.BEGIN}\nnew\n{readme.END}\nafter\n"
    with pytest.raises(ValueError, match="must contain the lines"):
        readme.fill_section(f"{readme.END}\n{readme.BEGIN}", "new\n")


def test_pages_show_the_figures_of_the_stored_results() -> None:
    for page, content in ((readme.README, readme.format_headlines()), (readme.PAGE, readme.format_section())):
        text = page.read_text()
        assert readme.fill_section(text, content) == text, "run `python -m bench.readme`"
    assert PICTURE.read_text() == readme.draw_picture(), "run `python -m bench.readme`"


def test_picture_has_a_bar_for_each_ratio_from_the_line_of_equal_speed() -> None:
    picture = ElementTree.fromstring(draw_ratio_bars([("a < b", "100×"), ("slower", "0.100×"), ("equal", "1.00×")]))
    svg = "{http://www.w3.org/2000/svg}"
    bars = [(item.get("class"), float(item.get("x")), float(item.get("width"))) for item in picture.iter(f"{svg}rect")]
    (line_x,) = [float(line.get("x1")) for line in picture.iter(f"{svg}line")]
    assert [kind for kind, _, _ in bars] == ["bar", "slower", "bar"]
    (_, faster_start, faster_width), (_, slower_start, slower_width), _ = bars
    assert faster_start == line_x
    assert faster_width == pytest.approx(2 * slower_width, abs=0.2), "the logarithm of 100 is twice that of 1 / 0.1"
    assert slower_start + slower_width == pytest.approx(line_x, abs=0.2)
    assert "a < b" in [text.text for text in picture.iter(f"{svg}text")]


def test_headline_of_the_readme_is_a_row_of_its_bench() -> None:
    head_lines, caption_lines = 2, 2
    assert len(readme.format_headlines().splitlines()) == head_lines + len(readme.HEADLINES) + caption_lines


def test_every_claim_of_the_readme_names_a_row_of_its_bench() -> None:
    assert set(readme.CLAIMS) == set(BENCHES)
    for name in BENCHES:
        if (RESULTS / f"{name}.json").exists():
            measured_rows = {(row.case, row.measure) for row in Report.load(name).rows}
            assert set(readme.CLAIMS[name]) <= measured_rows


def test_namespace_tree_has_the_counts_of_the_polaris_benchmarks() -> None:
    """A tree of width N and depth D has (N^D - 1)/(N - 1) namespaces, and N^(D-1) leaves with the tables and views."""
    dataset = build_tree("NS_0", width=3, depth=4, tables=5, views=2)
    assert len(set(dataset.namespaces)) == (3**4 - 1) // 2
    assert len(set(dataset.tables)) == 3**3 * 5
    assert len(set(dataset.views)) == 3**3 * 2
    assert {len(leaf) for leaf, _ in dataset.tables} == {4}


def test_long_history_is_metadata_that_pyiceberg_accepts(tmp_path: Path) -> None:
    from pyiceberg.table.metadata import TableMetadataUtil

    location = write_long_history(tmp_path / "t", 50)
    text = Path(location.removeprefix("file://")).read_text()
    metadata = TableMetadataUtil.parse_raw(text)
    assert len(metadata.snapshots) == len(metadata.snapshot_log) == 50
    assert metadata.last_sequence_number == 50
    assert len(json.loads(text)["metadata-log"]) == 50
