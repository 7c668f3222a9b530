"""DuckDB over the files that a query's conditions and joins leave. `seamark.duckdb` is its interface."""
