"""Runs SQL statements of one dialect: plans them with indexes and joins, and chooses the engine for each."""
