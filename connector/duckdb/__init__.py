"""Runs queries in DuckDB over the files that their conditions and joins leave; `seamark.duckdb` is the
interface.
"""
