"""Aggregate queries over cubes, for the engines that run their own SQL."""
