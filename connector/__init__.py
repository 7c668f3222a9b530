"""Clients of the server: synchronous, picklable, never importing the server."""
