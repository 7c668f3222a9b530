"""Oracles and tests of scan planning."""
