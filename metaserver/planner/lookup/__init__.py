"""Lookups of file columns by partition prefix."""
