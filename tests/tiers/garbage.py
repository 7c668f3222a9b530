"""Python's garbage collector is off during the collection of tests, ignores the objects created by then, and runs
rarely.

Ten thousand tests and all imported modules stay until the process ends. Examining them repeatedly would take CPU time
from the tests. So would a collection after each 700 new objects, most of which are freed without one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

THRESHOLDS = (20_000, 20, 20)
"""The thresholds of the collector's three generations. The first is a number of new objects; the default is 700."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*THRESHOLDS)
        gc.enable()
