"""Tests of `seamark.formats.iceberg`; no server, no files: values in, values out."""
