"""Tests of stream tables with Trino."""
