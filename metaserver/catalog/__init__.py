"""Namespaces, tables, views and the commit: validate, write metadata, swap the pointer."""
