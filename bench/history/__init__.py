"""Benchmarks of the query history."""
