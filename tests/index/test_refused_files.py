"""Tests of the memory of data files that an index refuses."""

from __future__ import annotations

from seamark.metaserver.index.files.refused_files import REMEMBERED_S, RefusedFiles


def test_refused_files_are_remembered_for_a_day_within_the_limit() -> None:
    now_s = 0.0
    refused_files = RefusedFiles(lambda: now_s, files_max=3)
    refused_files.add(("a", "1"), [("x", "large"), ("y", "r" * 1000)])
    assert refused_files.find_reasons(("a", "1"), "xyz") == {"x": "large", "y": "r" * 300}
    assert refused_files.find_reasons(("a", "2"), "xyz") == {}
    refused_files.add(("b", "1"), [("x", "wide")])
    refused_files.add(("a", "1"), [("z", "late")])
    assert refused_files.find_reasons(("b", "1"), "x") == {}
    assert len(refused_files.find_reasons(("a", "1"), "xyz")) == 3
    refused_files.add(("a", "1"), [("w", "too many")])
    assert refused_files.find_reasons(("a", "1"), "w") == {}
    now_s = REMEMBERED_S
    assert refused_files.find_reasons(("a", "1"), "xyz") == {}
    for number in range(5):
        refused_files.add(("a", str(number)), [])
    assert not refused_files._reasons, "indexes without refused files take no memory"
