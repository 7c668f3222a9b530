"""Reads tables: plans scan tasks, reads their rows, and computes changes between snapshots."""
