"""Tests with a grid of parameters run a part of the grid in the fast tier, and the whole grid in the slow tier.

`@pytest.mark.each_value` keeps cases in the fast tier so that each value of each parameter occurs in one of them.
`@pytest.mark.each_pair` keeps cases so that each pair of values of two parameters occurs. `@pytest.mark.few_cases(2)`
keeps two cases with as many different values as possible. All three mark the other cases `slow`. Faults mostly depend
on one value or on a pair of values, so a few cases find most of what the grid finds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import pytest

COMBINATION_SIZES = {"each_value": 1, "each_pair": 2}
"""The number of parameters whose values must occur together, for each marker."""
FEW_CASES = "few_cases"
"""The marker of tests with a maximum number of cases in the fast tier. It takes precedence over the other markers."""


def choose_covering_cases(cases: Sequence[Mapping[str, int]], size: int, maximum: int | None = None) -> set[int]:
    """Return the positions of cases that together have each combination of `size` values.

    Args:
        cases: For each case, the number of the value of each parameter.
        size: The number of parameters in a combination.
        maximum: The maximum number of positions. If it is too low for all combinations, some are missing.
    """
    missing_combinations = [set(combinations(sorted(case.items()), size)) for case in cases]
    case_numbers: set[int] = set()
    while any(missing_combinations) and (maximum is None or len(case_numbers) < maximum):
        best_case = max(range(len(cases)), key=lambda number: len(missing_combinations[number]))
        case_numbers.add(best_case)
        missing_combinations = [combination - missing_combinations[best_case] for combination in missing_combinations]
    return case_numbers


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases `slow` that the fast tier leaves out.

    The choice is among the collected cases. So a case that the user names alone is not marked.
    """
    grids: dict[tuple[str, int, int | None], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            name = item.nodeid.partition("[")[0]
            if few_marker := item.get_closest_marker(FEW_CASES):
                grids.setdefault((name, 1, few_marker.args[0]), []).append(item)
                continue
            for marker, size in COMBINATION_SIZES.items():
                if item.get_closest_marker(marker):
                    grids.setdefault((name, size, None), []).append(item)
    for (_, size, maximum), grid in grids.items():
        # Cases with the same value share the object, so its identity is used. Some objects have no hash.
        values = [{name: id(value) for name, value in item.callspec.params.items()} for item in grid]
        chosen_cases = choose_covering_cases(values, size, maximum)
        for position, item in enumerate(grid):
            if position not in chosen_cases:
                item.add_marker(pytest.mark.slow)
