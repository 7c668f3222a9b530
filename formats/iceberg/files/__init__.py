"""Readers of Parquet and Puffin metadata."""
