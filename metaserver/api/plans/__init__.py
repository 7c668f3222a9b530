"""Scan planning, plan tables, plan views, explain."""
