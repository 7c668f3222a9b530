"""Ownership: the locations and files of tables, and the owners of views."""
