"""Trino's client protocol: forwards requests, follows rewritten statements, and withdraws plans."""
