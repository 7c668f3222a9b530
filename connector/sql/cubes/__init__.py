"""Aggregate queries over the groups of cubes."""
