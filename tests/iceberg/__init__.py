"""Tests of `seamark.formats.iceberg`, with values only: no server and no files."""
