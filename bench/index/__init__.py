"""Indexes, measured: each kind against what readers do without it."""
