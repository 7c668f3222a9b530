"""Tests of the rows of requests: kinds, JSON, dead letters, several tables."""
