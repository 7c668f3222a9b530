"""Runs SQL statements of one dialect: plans them with indexes and joins, and chooses an engine for each statement."""
