"""Tests of the further warehouses of a server."""
