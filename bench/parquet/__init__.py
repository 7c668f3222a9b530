"""Benchmarks of rewrites that copy parts of Parquet files."""
