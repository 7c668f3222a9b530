"""Trino's client protocol: requests forwarded, rewritten statements watched, plans withdrawn."""
