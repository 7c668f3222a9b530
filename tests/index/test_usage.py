"""Tests of counters of index use: they add up, and the number of indexes is limited."""

from __future__ import annotations

import pytest

from seamark.metaserver.index.files import usage
from seamark.metaserver.index.files.usage import Usage


def test_index_unused_for_the_longest_time_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "COUNTED_INDEXES_MAX", 2)
    counted_usage = Usage()
    for now_ms, index in enumerate(["a", "b", "a", "c"]):
        counted_usage.note("u", index, files_in=5, files_removed=now_ms, now_ms=now_ms)
    assert counted_usage.find_usage("u", "b") is None
    assert counted_usage.find_usage("other", "a") is None
    actual_usage = counted_usage.find_usage("u", "a")
    assert actual_usage is not None
    assert (actual_usage.last_ms, actual_usage.plans, actual_usage.files_in, actual_usage.files_removed) == (
        2,
        2,
        10,
        2,
    )
