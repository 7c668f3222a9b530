"""Builds, merges, verifies and audits index files."""
