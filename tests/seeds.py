"""Seeds of random tests: the same in every ordinary run, and a new seed when tests explore.

`make test` checks a change, so its result must not depend on chance: its random tests use the same numbers each time.
`make test-all` sets TEST_EXPLORE=1 and searches for new failures. It uses one random seed for all its processes,
because some names of tests contain it, and pytest-xdist stops if two processes collect different names. A test prints
its first seed. To repeat a failure, set TEST_EXPLORE=1 and set TEST_SEED (or the variable that the test names) to this
number. Without TEST_EXPLORE a test may run fewer rounds.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

IS_EXPLORING = os.environ.get("TEST_EXPLORE", "") not in ("", "0")
DEFAULT_EXAMPLES = 10
"""The number of examples of a test in an ordinary run, if the test has no number of its own."""


def first_seed(variable: str = "TEST_SEED") -> int:
    """Return the number in the environment variable `variable` or in TEST_SEED.

    If neither is set, return 1, or a random number in an exploring run, which sets TEST_SEED for its other processes.
    """
    seed = os.environ.get(variable) or os.environ.get("TEST_SEED")
    if not seed:
        seed = str(random.SystemRandom().randrange(1, 1 << 30)) if IS_EXPLORING else "1"
        if IS_EXPLORING:
            os.environ["TEST_SEED"] = seed
    return int(seed)


def list_seeds_by_version(
    seeds: Iterable[int], versions: Sequence[int] = (2, 3), fast: int | None = None
) -> list[ParameterSet]:
    """Return parameters `("seed", "version")`: each seed with each format version.

    In the fast tier, each of the first `fast` seeds (by default all) has one version, and the versions alternate.
    """
    numbered_seeds = list(enumerate(seeds))
    fast_count = len(numbered_seeds) if fast is None else fast
    return [
        pytest.param(
            seed, version, marks=[] if position == number % len(versions) and number < fast_count else pytest.mark.slow
        )
        for number, seed in numbered_seeds
        for position, version in enumerate(versions)
    ]


def examples(number: int, number_in_ordinary_runs: int | None = None) -> int:
    """Return the number of examples or rounds of a random test: `number` if tests explore.

    An ordinary run uses the same examples each time, so it uses only `number_in_ordinary_runs` of them. The default is
    a tenth of `number`.
    """
    if IS_EXPLORING:
        return number
    return -(-number // 10) if number_in_ordinary_runs is None else number_in_ordinary_runs


def mark_fast(values: Iterable[Any], fast_count: int) -> list[ParameterSet]:
    """Return the values as parameters of a test. Only the first `fast_count` values are in the fast tier."""
    return [
        pytest.param(value, marks=[] if position < fast_count else pytest.mark.slow)
        for position, value in enumerate(values)
    ]


def configure_hypothesis() -> None:
    """Configure Hypothesis, and choose the seed of an exploring run before pytest-xdist starts processes.

    There are no deadlines, because durations on a busy machine say nothing about the code. An ordinary run uses
    `DEFAULT_EXAMPLES` examples for a test that sets no number. An exploring run uses Hypothesis's default of a hundred.

    Hypothesis also draws constants from modules of the project that the process has imported. An ordinary run disables
    this. With it, the examples of a test would depend on the other tests of the run, and each process would parse all
    modules.
    """
    first_seed()
    if not IS_EXPLORING:
        providers._get_local_constants = lambda: providers._local_constants
    shared_settings: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile(
        "ordinary", max_examples=DEFAULT_EXAMPLES, derandomize=True, database=None, **shared_settings
    )
    settings.register_profile("explore", print_blob=True, **shared_settings)
    settings.load_profile("explore" if IS_EXPLORING else "ordinary")
