"""Tests of the readers: rows, pages, schemas, whole files."""
