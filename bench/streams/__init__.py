"""Benchmarks of stream tables."""
