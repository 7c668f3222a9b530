"""Compiled loops over index data. They import only each other."""
