"""Rows of requests: from their bytes to the batches of the log."""
