"""Lookups of manifest columns by partition prefix."""
