"""Benchmarks of writers and readers, compared with those of Iceberg, PyIceberg and Hudi."""
