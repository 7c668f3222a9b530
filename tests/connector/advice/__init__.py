"""Tests of the advisor's proposals: their predictions, and comparisons with an exhaustive search."""
