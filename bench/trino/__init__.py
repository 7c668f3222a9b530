"""Benchmarks of queries through the Trino proxy, compared with Trino alone on the same tables."""
