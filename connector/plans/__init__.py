"""Requests plans for the tables in a query of any engine."""
