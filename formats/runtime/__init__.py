"""Errors, clocks, locks, TLS and connections: modules that every package can import."""
