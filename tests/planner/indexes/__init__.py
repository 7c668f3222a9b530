"""Tests of plans that use indexes."""
