"""Unmodified engines on a running server, with local files and with a real S3 store."""
