"""Namespaces, tables, views and functions: create, load, rename, drop, restore and purge."""
