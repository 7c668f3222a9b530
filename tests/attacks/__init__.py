"""Attacks on a running server. A hostile tenant must never get names, values or bytes of another tenant."""
