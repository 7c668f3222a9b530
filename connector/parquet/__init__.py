"""Reads and writes Parquet data files of Iceberg tables: columns by field id, row groups, pages and column metrics."""
