"""Processes, disks and networks that fail on demand."""
