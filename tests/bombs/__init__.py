"""Tests of small files and requests that would take much memory. Each is rejected, or answered within a limit."""
