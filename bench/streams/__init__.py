"""Benches of streams."""
