"""Unmodified Spark with the server's plans."""
