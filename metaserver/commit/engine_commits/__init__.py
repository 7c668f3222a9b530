"""Commits that engines send as updates and requirements of the REST specification."""
