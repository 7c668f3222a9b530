"""Tests of the additional warehouses of a server."""
