"""Marks for tests that need a program that a machine may lack."""

from __future__ import annotations

import os

import pytest

from seamark.commands.installation.java import find_java_25_home

NEEDS_TRINO = [
    pytest.mark.trino,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        find_java_25_home() is None and "CI" not in os.environ,
        reason="Trino needs a JDK 25 (JAVA25, or one below /usr/lib/jvm)",
    ),
]
"""Marks of the tests with Trino. CI machines have the required JDK."""
