"""Schemas, types, values and transforms."""
