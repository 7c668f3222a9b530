"""Benchmarks of commands that recover a catalog."""
