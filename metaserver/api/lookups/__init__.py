"""Lookups of files, statistics, rows and bitmaps."""
