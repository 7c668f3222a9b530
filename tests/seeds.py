"""Where a random test begins: at one place in every ordinary run, somewhere new where tests explore.

`make test` judges a change, so it must not depend on luck: its random tests draw the same numbers each time.
`make test-all` sets TEST_EXPLORE=1 and looks for what nobody has seen yet. A test says the seed it began with; that
number in TEST_SEED (or in the variable that the test names) repeats it.
"""

from __future__ import annotations

import os
import random

from hypothesis import settings

EXPLORING = os.environ.get("TEST_EXPLORE", "") not in ("", "0")


def first_seed(variable: str = "TEST_SEED") -> int:
    said = os.environ.get(variable)
    if said:
        return int(said)
    return random.SystemRandom().randrange(1, 1 << 30) if EXPLORING else 1


def settle() -> None:
    """The same for Hypothesis. No deadlines: how long one example took on a busy machine is no property of the code."""
    settings.register_profile("judge", derandomize=True, deadline=None, database=None)
    settings.register_profile("explore", deadline=None, print_blob=True)
    settings.load_profile("explore" if EXPLORING else "judge")
