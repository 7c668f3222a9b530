"""Tests that the benchmark's data follow its definition, and that its reports show what was measured."""
