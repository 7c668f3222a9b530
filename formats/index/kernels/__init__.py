"""Compiled loops over index data. The modules import only each other."""
