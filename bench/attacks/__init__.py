"""Measure what one client can do to the other clients of a server.

The attacks use up resources of the server. At the same time, the benchmark measures the answers to a good client.
"""
