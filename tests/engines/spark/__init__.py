"""Spark, unmodified, with the server's plans."""
