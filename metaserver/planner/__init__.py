"""Scan planning: which files a reader has to open."""
