"""Tests of the pointer store: one contract, run on SQLite and on PostgreSQL."""
