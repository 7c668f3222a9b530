"""Benchmarks of scan planning on generated tables, compared with PyIceberg and Iceberg's Java planner."""
