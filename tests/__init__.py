"""Tests of Seamark. They are a package, so that they share the service starters in `tests.services`."""
