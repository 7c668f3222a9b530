"""Runs Spark SQL on only the files that a query's conditions and joins need."""
