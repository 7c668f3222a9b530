"""Parses Trino statements, and finds the tables that they scan and the conditions on the rows of these tables."""
