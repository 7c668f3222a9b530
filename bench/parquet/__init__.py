"""Benches of the copy of Parquet files."""
