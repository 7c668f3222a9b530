"""Commits of changes: files are added and removed, and several changes are published together."""
