"""Decodes and checks the rows of requests, and converts them to batches of the log."""
