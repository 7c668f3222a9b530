"""Requests plans for the tables of a query of any engine."""
