"""Benches of stream tables."""
