"""Tests of the pointer store: one contract for SQLite and PostgreSQL."""
