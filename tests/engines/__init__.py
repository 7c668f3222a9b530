"""Unmodified engines at a real server, on local files and on a real S3 store."""
