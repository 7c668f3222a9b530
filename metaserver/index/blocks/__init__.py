"""Columnar blocks: the live entries of one manifest as packed columns."""
