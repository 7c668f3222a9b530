"""Pruning by partition values and column statistics."""
