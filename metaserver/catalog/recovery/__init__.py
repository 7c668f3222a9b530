"""Finds tables, views and functions in a warehouse again, after the loss or the restore of a database."""
