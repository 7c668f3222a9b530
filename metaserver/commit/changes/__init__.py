"""Commits of changes, which add and remove files. Several changes of a table are published together."""
