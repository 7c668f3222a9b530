"""Errors, clocks, locks, TLS and connections: modules that any package may import."""
