"""Encodes a scan as JSON."""
