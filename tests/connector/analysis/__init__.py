"""Tests of the analysis of Trino statements: what it extracts, and how it rewrites them."""
