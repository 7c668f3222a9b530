"""Snapshots made of changes: what was added, removed and read, onto whatever stands when it is the change's turn."""
