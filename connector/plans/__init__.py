"""Requests plans for the tables that a query of any engine reads."""
