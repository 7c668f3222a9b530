"""Benches of the query history."""
