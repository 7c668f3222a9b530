"""Compiled loops over index data. They import nothing of ours but each other."""
