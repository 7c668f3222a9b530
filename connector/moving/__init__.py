"""Moves tables between catalogs: reads the names of another catalog, and registers the same metadata files."""
