"""Tests of scan planning, and the oracles that they use."""
