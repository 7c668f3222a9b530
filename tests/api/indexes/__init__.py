"""Tests of the routes for indexes, bitmaps and lookups."""
