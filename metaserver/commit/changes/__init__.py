"""Commits by changes: files added and removed, several changes in one publication."""
