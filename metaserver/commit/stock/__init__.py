"""Commits by updates and requirements, as stock engines send them."""
