"""Tests of `seamark.metaserver.iceberg`; no server, no files: values in, values out."""
