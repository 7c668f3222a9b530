"""Compiled loops over index data. These modules import only each other."""
