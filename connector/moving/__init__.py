"""Moves tables between Seamark and other catalogs. The target registers the metadata files of the source."""
