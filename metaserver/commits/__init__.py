"""Commits of changes: creates a snapshot from added, removed and read files on the current head of a branch."""
