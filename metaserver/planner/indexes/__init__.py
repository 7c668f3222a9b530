"""Pruning by indexes."""
