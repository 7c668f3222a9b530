"""Proposals of the advisor: predictions against results, and against an exhaustive search."""
