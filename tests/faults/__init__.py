"""Tests with real processes: servers killed at each step of a commit, racing clients, and a checker of histories."""
