"""Schemas, types, values and transforms of Iceberg."""
