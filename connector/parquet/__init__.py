"""Parquet data files of Iceberg tables, read for what this project needs beyond what engines do with them."""
