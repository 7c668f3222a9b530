"""Readers and writers of Parquet and Puffin metadata."""
