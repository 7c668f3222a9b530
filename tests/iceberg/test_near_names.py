"""Tests of the names that a message suggests, and of the cost of the search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from seamark.formats.iceberg.types import near_names as module
from seamark.formats.iceberg.types.near_names import CHARACTERS_MAX, COMPARED_MAX, find_near_names


def test_misspelled_name_is_found_regardless_of_case() -> None:
    assert find_near_names("PRCIE", ["id", "price", "data"]) == ["price"]
    assert find_near_names("adress", ["Address", "amount"]) == ["Address"]
    assert find_near_names("nothing", ["id", "price"]) == []


def test_name_is_compared_with_few_short_names_in_a_wide_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared_names: list[Sequence[str]] = []

    def get_close_matches(name: str, candidates: Any, n: int, cutoff: float) -> list[str]:
        compared_names.append([name, *candidates])
        return []

    monkeypatch.setattr(module, "get_close_matches", get_close_matches)
    columns = [f"customer_shipping_address_region_{number}" for number in range(50_000)]
    assert find_near_names("customer_shipping_address_region_x", columns) == []
    assert find_near_names("id", ["x" * 1_000_000]) == []
    assert find_near_names("x" * 1000, columns) == []
    assert [len(names) for names in compared_names] == [COMPARED_MAX + 1, 1]
    assert all(len(name) <= 2 * CHARACTERS_MAX for names in compared_names for name in names)


def test_long_name_is_compared_with_few_similar_names(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []

    def get_close_matches(name: str, candidates: Any, n: int, cutoff: float) -> list[str]:
        steps.append(sum(len(name) * len(other) for other in candidates))
        return []

    monkeypatch.setattr(module, "get_close_matches", get_close_matches)
    find_near_names("a" * 99, [f"{'a' * 95}{number:03}" for number in range(5_000)])
    assert 0 < steps[0] <= 250_000
