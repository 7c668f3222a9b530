"""Measures how many files and functions a request runs through."""
