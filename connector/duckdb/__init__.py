"""Runs queries in DuckDB on only the files that their conditions and joins need. `seamark.duckdb` is the interface."""
