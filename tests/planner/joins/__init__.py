"""Tests of plans with joins."""
