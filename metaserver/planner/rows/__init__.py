"""Rows by key or predicate, and which of them are deleted."""
