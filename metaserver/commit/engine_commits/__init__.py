"""Commits by updates and requirements, as the libraries of engines send them."""
