"""Python's garbage collector is off while tests are collected, and never looks at what is there afterwards.

Twelve thousand tests and all imported modules stay until the process ends. To examine them again and again takes CPU
time from the tests.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
