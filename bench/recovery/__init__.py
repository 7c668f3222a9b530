"""Measurements of commands that recover a catalog."""
