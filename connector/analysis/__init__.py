"""Trino's statements: parsed, and reduced to the tables they scan and the conditions on them."""
