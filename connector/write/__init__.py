"""Writes tables: data files, delete files, and the commits that add them."""
