"""Python's garbage collector is off while tests are collected, never looks at what is there afterwards, and runs less
often than by default.

Ten thousand tests and all imported modules stay until the process ends. To examine them again and again takes CPU
time from the tests; so do collections after each 700 new objects, of which most are freed without one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

THRESHOLDS = (20_000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(*THRESHOLDS)
        gc.enable()
