"""Seamark from PySpark: sessions, readers, writers and jobs."""

from connector.spark.writing import write

__all__ = ["write"]
