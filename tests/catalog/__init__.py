"""Tests of the catalog over a real SQLite store and real files, and with injected faults."""
