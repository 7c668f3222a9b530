"""Tests of the documentation: its commands run, its lists match the code, and its links lead somewhere."""
