"""Conflicts of a change with the snapshots that were committed since it was computed."""
