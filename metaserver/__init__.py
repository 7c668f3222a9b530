"""Seamark's server: an Iceberg REST catalog with a timeline."""
