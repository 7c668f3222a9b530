"""Recovers tables, views and functions from the files in a warehouse after a database is lost or restored."""
