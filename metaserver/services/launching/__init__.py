"""Launchers, which run jobs in worker processes and on Spark."""
