"""Logs, metrics and traces of requests, for operators."""
