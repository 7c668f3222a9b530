"""Tests of merged groups of cubes."""
