"""Tests of unmodified Spark with the server's plans."""
