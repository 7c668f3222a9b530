"""Tests of the index kinds and their kernels."""
