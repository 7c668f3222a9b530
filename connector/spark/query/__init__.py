"""Spark SQL over the files that a query's conditions and joins leave."""
