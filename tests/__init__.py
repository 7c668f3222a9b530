"""Tests; importable, so that they share the service starters in `tests.services`."""
