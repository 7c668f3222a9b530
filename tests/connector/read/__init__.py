"""Readers: rows, pages, schemas, whole files."""
