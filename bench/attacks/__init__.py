"""Measure what one client can do to the other clients of a server.

The attacks use up resources of the server. A good client runs beside them and is timed.
"""
