"""Casts, filters, partitions and sorts Arrow data by the rules of Iceberg."""
