"""Tests of input topics."""
