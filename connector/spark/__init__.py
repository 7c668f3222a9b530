"""Seamark from PySpark: sessions and jobs."""
