"""Tests of the rows in requests: kinds, JSON, dead letters, several tables."""
