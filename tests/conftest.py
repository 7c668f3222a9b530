"""Shared fixtures are written beside what they start, in `tests/services/fixtures.py`."""

pytest_plugins = ["tests.services.fixtures", "tests.services.spread"]
