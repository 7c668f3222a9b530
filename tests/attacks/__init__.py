"""Attacks on a running server: a hostile tenant must never get names, values or bytes of another tenant."""
