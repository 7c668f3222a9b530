"""Tests of stream tables whose key changes."""
